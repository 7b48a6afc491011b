"""The native library, a forwarding backend and what runs in every iteration: find it, load it, build it.

It is optional: without it process groups are exchanged (see `swift_agent.worker.groups.process_groups`), generators
seeded and hyper-parameters compared in pure Python, with the same results. It must never be compiled while a job
starts: `load()` only looks into the cache, `python -m swift_agent.native build` fills it.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import stat
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).with_name("forward.cpp")
HEADERS = tuple(SOURCE.with_name(name) for name in ("seeds.h", "watch.h"))
_MODULE = "swift_agent_forward"
# pybind11 refuses to register a type twice, so one process loads the library at most once.
_loaded: ModuleType | None = None


class BuildError(RuntimeError):
    """The native backend could not be compiled; the message ends with the compiler's own. Nothing was installed."""


def library_path() -> Path:
    """Where the library for this torch, this Python and this source is or will be.

    The folder is `$SWIFT_NATIVE_DIR`, else `~/.cache/swift-agent/native`. Every part of the binary interface is in
    the name: a library for another torch must not even be found.
    """
    import torch

    root = os.environ.get("SWIFT_NATIVE_DIR") or Path.home() / ".cache" / "swift-agent" / "native"
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    key = f"{torch.__version__}|{torch.version.git_version}|{suffix}|{torch.compiled_with_cxx11_abi()}|"
    source = b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))
    digest = hashlib.sha256(key.encode() + source).hexdigest()[:16]
    return Path(root) / f"torch-{torch.__version__}-{digest}" / f"{_MODULE}{suffix}"


def load() -> ModuleType | None:
    """The compiled module (classes `Forward`, `Seeder`, `Watch`), or None: not built for this torch, or
    `SWIFT_NATIVE=0`.

    Raises ImportError when a library is there and cannot be loaded, or when others may have put it there: a damaged
    cache must not pass unseen.
    """
    global _loaded
    if os.environ.get("SWIFT_NATIVE") == "0":
        return None
    if _loaded is not None:
        return _loaded
    path = library_path()
    if not path.is_file():
        return None
    _check_owners(path)
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise ImportError(
            f"{path} cannot be loaded: {error}\n"
            "  next    run `python -m swift_agent.native build --force`, or delete it"
        ) from error
    _loaded = module
    return module


def _check_owners(path: Path) -> None:
    """To load it is to run it, so it has to come from this user, from root, or from the owner of this package."""
    trusted = {os.getuid(), 0, Path(__file__).stat().st_uid}
    for one in (path, path.parent):
        found = one.stat()
        if found.st_uid not in trusted or found.st_mode & stat.S_IWOTH:
            who = f"user {found.st_uid} owns it" if found.st_uid not in trusted else "all users may write it"
            raise ImportError(
                f"{path} is not loaded: {who} ({one})\n"
                "  next    build it with `python -m swift_agent.native build` into a directory of your own, and name "
                "that in SWIFT_NATIVE_DIR"
            )


def build(*, force: bool = False) -> Path:
    """Compile `forward.cpp` (about 20 s, one core) and install it in the cache; returns its path.

    Does nothing when it is there already, unless `force`. Raises BuildError. A library that is in use is replaced, not
    overwritten; two builds at a time are harmless.
    """
    path = library_path()
    if path.is_file() and not force:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = _compile_command(made)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BuildError(f"no C++ compiler: {command[0]}: {error.strerror}") from error
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stderr[-4000:]}")
        os.replace(made, path)
    return path


def _compile_command(output: Path) -> list[str]:
    # One file needs no build system: torch's own `load()` would ask for ninja, which torch does not bring along.
    from torch.utils import cpp_extension

    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = cpp_extension.library_paths()
    return [
        os.environ.get("CXX", "c++"),
        *("-shared", "-fPIC", "-std=c++20", "-O2", "-g0", "-fvisibility=hidden"),
        f"-DTORCH_EXTENSION_NAME={_MODULE}",
        *(flag for folder in includes for flag in ("-isystem", folder)),
        str(SOURCE),
        *(f"-L{folder}" for folder in libraries),
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
        *("-o", str(output)),
    ]

"""Runs a user's script inside a process of ours: in one that was forked from the standby server as `python -u` would
have run it, or, with `--run-path`, in one of its own as torch's launcher does.

This module must never import more than the interpreter has loaded anyway: its time is part of every recovery.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def run(kind: str, target: str, args: list[str]) -> NoReturn:
    """Run script or module *target* as `__main__` with *args*, then exit the process as the interpreter would."""

    def as_main() -> None:
        _seed_like_a_new_process()
        sys.argv = [target, *args]
        if kind == "module":
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")

    _run(as_main)


def run_path(args: list[str]) -> NoReturn:
    """Run a script, *args* begin with its path, as torch's launcher does with `--run-path`: how it fails is recorded,
    and its groups of processes are not taken down when it ends, which aborts one whose peers have ended already."""
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.run import run_script_path

    _run(lambda: record(run_script_path)(*args))


def _run(main: Callable[[], object]) -> NoReturn:
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:
        code = 1
        # Through the hook, so that what the script or the session installed there is honoured.
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as stop:
            code = _exit_code(stop)
        except BaseException:
            traceback.print_exc()
    finally:
        code = _finish(code)
        os._exit(code)


def _seed_like_a_new_process() -> None:
    import random

    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    # That of the standby server, which torch has drawn when it was imported.
    torch.default_generator.manual_seed(torch.default_generator.initial_seed())


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _finish(code: int) -> int:
    """What the interpreter does at exit: wait for threads, run `atexit`, flush. os._exit follows, since the fork's
    own shutdown would run the standby server's handlers."""
    import atexit
    import ctypes
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]  # what Py_Finalize calls first
        atexit._run_exitfuncs()
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException:
        traceback.print_exc()
        code = code or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    ctypes.CDLL(None).fflush(None)  # what compiled code has printed
    return code

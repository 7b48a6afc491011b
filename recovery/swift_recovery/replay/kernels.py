"""What the bits of a result depend on beside the script: torch, its libraries, and the processors that compute.

A process where that differs must not help to repeat what is lost. This module must never guess that two are alike: what
may choose another kernel is named.
"""

from __future__ import annotations

import contextlib
import os
import platform
import zlib

import torch

# Variables by which libraries choose kernels.
_CHOOSE_KERNELS = (
    "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip


def computes_with(device: torch.device | None = None) -> str:
    """What the bits of a result depend on, beside the script, in words."""
    num_threads = torch.get_num_threads()
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    on_cpu = f"{threads}, {torch.backends.cpu.get_cpu_capability()}, {_processor()}"
    # Libraries choose kernels by the model of a processor, and by these.
    chosen = [f"{name}={os.environ[name]}" for name in _CHOOSE_KERNELS if name in os.environ]
    # One build of torch shows there what it has found, too.
    build = [line for line in torch.__config__.show().splitlines() if "CPU capability" not in line]
    built = f"build {zlib.crc32(chr(10).join(build).encode()):08x}"
    on_gpu = []
    if device is not None and device.type == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        on_gpu = [torch.cuda.get_device_name(device), f"cuDNN {cudnn}"]
    return ", ".join([f"torch {torch.__version__}", built, on_cpu, *chosen, *on_gpu])


def _processor() -> str:
    """Its model, where Linux names it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()

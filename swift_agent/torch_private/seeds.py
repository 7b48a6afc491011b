"""What is private in torch's seeding: whether it was given its seed, or has drawn it by itself.

A seed of 64 bits does not show that. `torch.manual_seed` leaves the call that will seed devices, or has made it.
Must never draw from a generator, nor seed one.
"""

from __future__ import annotations

import torch
import torch.cuda


def is_given() -> bool:
    """Whether the seed of torch's default generator was given by `torch.manual_seed`; False too if it was given to that
    generator alone, or drawn by `torch.seed`."""
    seed = torch.initial_seed() % (1 << 64)
    call, stack = torch.cuda._lazy_seed_tracker.manual_seed_all_cb or (None, [])
    if call is None:
        has_devices: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = torch.cuda.default_generators if has_devices else ()
        return any(one.initial_seed() % (1 << 64) == seed for one in devices)
    kept = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)).get("seed")
    is_drawn = any(f"{torch.random.__file__}\"" in line and line.split("\n")[0].endswith("in seed") for line in stack)
    return kept is not None and int(kept.cell_contents) % (1 << 64) == seed and not is_drawn

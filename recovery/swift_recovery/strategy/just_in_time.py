"""What failures cost N GPUs: periodic checkpoints, and such as are taken when one has failed (just in time). Pure.

The analysis of Just-In-Time Checkpointing (Gupta et al., EuroSys'24), its evaluation of the wasted GPU work, in its
letters: N, f, o, o_jit, r, m, c. Its numbers of equations are not given: the text at hand was notes on the paper.
It must never be asked for one job in two units: all times are seconds, all frequencies are per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fleet:
    """GPUs that train together. Raises `ValueError` for what cannot be.

    - *num_gpus*: N.
    - *failures_per_s*: f, of one GPU.
    - *checkpoint_s*: o, of one GPU, that does not train meanwhile.
    - *restart_s*: r, of all GPUs after a failure: processes, devices, data, the checkpoint's way back.
    - *minibatch_s*: m, one iteration.
    - *interception*: o_jit, what watching for failures takes of each second while nothing fails, from 0 to 1.
    """

    num_gpus: int
    failures_per_s: float
    checkpoint_s: float
    restart_s: float
    minibatch_s: float
    interception: float = 0.0

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.failures_per_s <= 0 or self.checkpoint_s <= 0:
            raise ValueError("there are GPUs, which fail at times, and a checkpoint takes time")
        if self.restart_s < 0 or self.minibatch_s < 0 or not 0 <= self.interception < 1:
            raise ValueError("a restart and a minibatch take no negative time, and interception a part of the time")

    @property
    def job_failures_per_s(self) -> float:
        """N f."""
        return self.num_gpus * self.failures_per_s


def checkpoints(fleet: Fleet, per_s: float) -> float:
    """N c o: GPU seconds in each second, for checkpoints *per_s* (c) times a second on every GPU."""
    return fleet.num_gpus * per_s * fleet.checkpoint_s


def recoveries(fleet: Fleet, per_s: float) -> float:
    """N^2 f (r + 1 / 2c): GPU seconds in each second. For each failure all GPUs restart, and train again what they had
    trained since the last checkpoint: half of what lies between two."""
    return fleet.num_gpus * fleet.job_failures_per_s * (fleet.restart_s + 1 / (2 * per_s))


def periodic(fleet: Fleet, per_s: float) -> float:
    """W / t = N (c o + N f r + N f / 2c): both together, GPU seconds in each second."""
    return checkpoints(fleet, per_s) + recoveries(fleet, per_s)


def best_frequency(fleet: Fleet) -> float:
    """c* = sqrt(N f / 2 o): checkpoints per second with which `periodic` is least. The same as 1 /
    `intervals.young_s`."""
    return math.sqrt(fleet.job_failures_per_s / (2 * fleet.checkpoint_s))


def least_periodic(fleet: Fleet) -> float:
    """W* / t = N (sqrt(2 N f o) + N f r): `periodic` with c*, GPU seconds in each second. Of it follows that the part
    of each GPU grows with the number of GPUs."""
    rate = fleet.job_failures_per_s
    return fleet.num_gpus * (math.sqrt(2 * rate * fleet.checkpoint_s) + rate * fleet.restart_s)


def by_the_script(fleet: Fleet) -> float:
    """W_jit / t = N (f o + o_jit + N f r + N f m / 2): GPU seconds in each second, for checkpoints that the script
    takes after a failure. One GPU's is counted for each; all restart and repeat half a minibatch."""
    again = fleet.job_failures_per_s * fleet.minibatch_s / 2
    restarts = fleet.job_failures_per_s * fleet.restart_s
    saved = fleet.failures_per_s * fleet.checkpoint_s
    return fleet.num_gpus * (saved + fleet.interception + restarts + again)


def transparent(fleet: Fleet) -> float:
    """W_jit / t = N (o_jit + N f m / 2): GPU seconds in each second, where nothing but the interrupted minibatch is
    repeated: processes stay, and so does the state."""
    return fleet.num_gpus * (fleet.interception + fleet.job_failures_per_s * fleet.minibatch_s / 2)


def of_each_gpu(fleet: Fleet, wasted: float) -> float:
    """w = W / N t: the part of the time of each GPU that is wasted, from the GPU seconds in each second of all."""
    return wasted / fleet.num_gpus


def pays_from(fleet: Fleet, interception: float) -> int:
    """The least number of GPUs with which transparent checkpoints waste less than the best periodic ones, if watching
    takes *interception* (0 to 1) of the time. The rest of *fleet* stays. 1 if they always do. Raises `ValueError` if
    they never do within 10^9 GPUs."""
    at = replace(fleet, interception=interception)
    low, high = 0, 1
    while not _pays(replace(at, num_gpus=high)):
        low, high = high, 2 * high
        if high > 10**9:
            raise ValueError("they never pay")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _pays(replace(at, num_gpus=middle)) else (middle, high)
    return high


def _pays(fleet: Fleet) -> bool:
    return transparent(fleet) < least_periodic(fleet)

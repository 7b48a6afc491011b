"""What the first runs of the newest iterations were given, so that another run of one can be compared with it.

A script that makes the batch of the next iteration in this one (`X, Y = get_batch()` while the device computes) leaves
it in a variable. Who is to run iteration t, but has another one there (a replacement has what the set-up made; who was
cut in t may have made the one after), runs iteration t - 1 once more for it, without effect: with the same seeds it
draws the same. Whether that is so, a process from before the failure finds out, from one iteration earlier on:

    t - 2, without effect --> t - 1, without effect: is it given what it was given at first? --> t

A position in a file, a hidden state, anything that does not come from generators is not the same then. This module must
never keep what an iteration was given alive, nor wait for a device.
"""

from __future__ import annotations

from typing import Any

import torch

from swift_agent.wire.given import fingerprint, leaves

_NUM_KEPT = 3


class FirstRuns:
    """Fingerprints, by iteration, of those that were given nothing as arguments: of what the model was called with."""

    def __init__(self) -> None:
        self._digests: dict[int, int] = {}

    def keep(self, number: int, digest: int) -> None:
        """The first run of iteration *number* has called the model with what has that fingerprint."""
        self._digests = {n: kept for n, kept in self._digests.items() if number - _NUM_KEPT < n < number}
        self._digests[number] = digest

    def knows(self, number: int) -> bool:
        return number in self._digests

    def is_same(self, number: int, inputs: Any) -> bool:
        """Whether it is known to have been given that."""
        return self.knows(number) and can_be_compared(inputs) and self._digests[number] == fingerprint(inputs)

    def differs(self, number: int, inputs: Any, *, has_effect: bool) -> bool:
        """Whether it is known to have been given something else. Of a run without effect, after the update, what was
        worked out from parameters says nothing."""
        if not self.knows(number) or (not has_effect and any(map(_has_gradient, leaves(inputs)))):
            return False
        return self._digests[number] != fingerprint(inputs)


def can_be_compared(inputs: Any) -> bool:
    """Whether a fingerprint of *inputs* says what is in them: there is a tensor, and no device to wait for."""
    tensors = [one for one in leaves(inputs) if isinstance(one, torch.Tensor)]
    return bool(tensors) and all(one.device.type == "cpu" and one.is_contiguous() for one in tensors)


def _has_gradient(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.requires_grad

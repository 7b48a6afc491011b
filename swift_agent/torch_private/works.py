"""Work objects of torch that are complete when they are made.

A caller returns one in the place of an operation that it has done itself, or that is not to be waited for. It must
never wait, communicate or touch a tensor: it says at once that all is done.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class Finished(dist.Work):
    """An operation that is done. (torch's FakeWork never says so to a caller that asks instead of waiting.)"""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def finished_work() -> dist.Work:
    """An operation that is done."""
    return Finished()

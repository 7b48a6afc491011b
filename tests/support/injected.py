"""Faults that the product makes for a test: ordered as `swiftctl inject` does it while the script is held before its
first iteration, and answered.

What its moments lack is fired by the scripts themselves (`fault_train.fault`): tests/README.md says which.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swift_agent.ctl.injection.inject import new_id, order
from swift_agent.wire.injected import Fault, Kind, Phase, checked
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig

if TYPE_CHECKING:
    from tests.support.job import Agents, Outcome

TIMEOUT_S = 90.0


def killed(
    rank: int, iteration: int, phase: Phase, part: float = 0.5, micro_batch: int = 1, kind: Kind = "kill-worker"
) -> Fault:
    """A worker, or its node, in the middle of a forward or a backward."""
    return checked(
        Fault(new_id(), kind, rank, iteration=iteration, phase=phase, part=part, micro_batch=micro_batch)
    )


def node_killed(rank: int, iteration: int, phase: Phase, part: float = 0.5, micro_batch: int = 1) -> Fault:
    return killed(rank, iteration, phase, part, micro_batch, "kill-node")


def apart(faults: Sequence[dict[str, Any] | Fault]) -> tuple[list[dict[str, Any]], list[Fault]]:
    """Those of the script, and those that are injected."""
    return [one for one in faults if isinstance(one, dict)], [one for one in faults if isinstance(one, Fault)]


class Injected:
    """Orders for a job whose orders have "held": made when all ranks are there, and when each of them stands in its
    worker the job is let go. One for each rank at a time."""

    def __init__(self, agents: Agents, faults: Sequence[Fault]) -> None:
        config = EtcdConfig.from_environment({}, endpoints=agents.endpoint)
        assert config is not None
        self._agents, self._faults = agents, faults
        self._answers: dict[str, dict[str, Any]] = {}
        self._store = EtcdStore(config)
        self._wait(self._all_are_there, "not all ranks have come to the begin of training")
        self._threads = [threading.Thread(target=self._order, args=(fault,)) for fault in faults]
        for thread in self._threads:
            thread.start()
        self._wait(self._all_stand, "not all orders wait for their moment")
        (agents.directory / "go").touch()

    def _order(self, fault: Fault) -> None:
        self._answers[fault.id] = order(self._store, Keys(self._agents.job_id), fault, TIMEOUT_S)

    def _all_are_there(self) -> bool:
        held = list(self._agents.directory.glob("held.*"))
        return bool(held) and {len(held)} == {int(path.read_text() or 0) for path in held}

    def _all_stand(self) -> bool:
        assert not self._answers, f"{self._answers}\n{self._agents.outcome(0.0).text()}"
        return self._agents.outcome(0.0).text().count("waits for its moment: ") == len(self._faults)

    def _wait(self, what: Any, why: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not what():
            assert time.monotonic() < deadline_s, f"{why}\n{self._agents.outcome(0.0).text()}"
            time.sleep(0.01)

    def assert_struck(self, outcome: Outcome) -> None:
        """Each of them, at its moment, which its agent has answered before it struck."""
        for thread in self._threads:
            thread.join()
        self._store.close()
        for fault in self._faults:
            answer = self._answers[fault.id]
            assert answer["state"] == "done", f"{fault}: {answer}\n{outcome.text()}"
            assert answer["what"] == f"{fault.kind} of {fault.target}, {fault.moment}", answer
            assert fault.kind != "kill-node" or outcome.exit_codes[answer["node"]] == -9, outcome.text()

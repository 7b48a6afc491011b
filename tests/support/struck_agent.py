"""`swift-run` that is struck at an exact step: it kills or freezes itself right before or right after a transaction.

    python struck_agent.py ARGS_OF_SWIFT_RUN

Only the place where a transaction is sent is patched, and only in this process. AGENT_ORDERS is JSON: *dir*, where the
files below are, and *strikes*, each with *node* (whom), *step* (which transaction, see `steps_of`), *generation* (0:
any), *when* ("before" or "after") and *do*:

    kill     SIGKILL to itself
    freeze   SIGSTOP to itself; what became of the transaction after it was woken goes to `outcome.INDEX`
    wait     no fault: it is slow, until the file `pass.NODE` is there

A kill and a freeze happen once; `struck.INDEX` says so. The agent enters the job when the file `enter.NODE` is there:
interpreters start side by side, nodes come in the order that the test wants.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_agent.agent import main  # noqa: F401 - what takes time to import, before the node may enter
from swift_agent.run import cli
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.kv import Compare, Op, Put, TransactionResult

ORDERS = json.loads(os.environ["AGENT_ORDERS"])
DIR = Path(ORDERS["dir"])
NODE = sys.argv[sys.argv.index("--node-id") + 1]


def steps_of(ops: Sequence[Op]) -> dict[str, int]:
    """What a transaction does, by the records that it writes: their name ("election" for that of the coordinator) ->
    generation (0 where it has none)."""
    found = {}
    for op in ops:
        if isinstance(op, Put):
            _, _, _, name, *rest = op.key.split("/")
            name, number = name.removeprefix("~"), rest[0] if rest else ""
            found[name] = int(number) if number.isdigit() else 0
            if name == "generation":
                found[name] = int(json.loads(op.value)["number"])
    if "coordinator" in found:
        found["election"] = found.pop("coordinator")
    if "generation" in found:
        found.pop("plan", None)  # it goes with its generation
    return found


def is_meant(strike: dict[str, Any], steps: dict[str, int]) -> bool:
    return (
        strike["node"] == NODE
        and strike["step"] in steps
        and strike.get("generation", 0) in (0, steps[strike["step"]])
    )


def strike_now(index: int, do: str) -> bool:
    """False if it has been done already."""
    if do == "wait":
        while not (DIR / f"pass.{NODE}").exists():
            time.sleep(0.005)
        return False
    try:
        os.close(os.open(DIR / f"struck.{index}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    # To this thread, so that it is the one that cannot take another step; the whole process stops or dies with it.
    signal.pthread_kill(threading.get_ident(), signal.SIGKILL if do == "kill" else signal.SIGSTOP)
    return True


def note(index: int, outcome: str) -> None:
    unfinished = DIR / f"outcome.{index}.new"
    unfinished.write_text(outcome)
    unfinished.rename(DIR / f"outcome.{index}")


def arm() -> None:
    send = EtcdStore.transaction

    def transaction(
        store: EtcdStore, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = (), **options: Any
    ) -> TransactionResult:
        steps = steps_of(success)
        meant = [(index, strike) for index, strike in enumerate(ORDERS["strikes"]) if is_meant(strike, steps)]
        woken = [
            index for index, strike in meant if strike["when"] == "before" and strike_now(index, strike["do"])
        ]
        try:
            result = send(store, compare, success, failure, **options)
        except RendezvousError as error:
            for index in woken:
                note(index, type(error).__name__)
            raise
        for index in woken:
            note(index, "applied" if result.succeeded else "refused")
        for index, strike in meant:
            if strike["when"] == "after" and result.succeeded and strike_now(index, strike["do"]):
                note(index, "applied")
        return result

    EtcdStore.transaction = transaction  # type: ignore[method-assign]


if __name__ == "__main__":
    arm()
    while not (DIR / f"enter.{NODE}").exists():
        time.sleep(0.005)
    cli()

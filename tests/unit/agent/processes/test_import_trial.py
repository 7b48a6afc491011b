"""What a module may do when it is imported in a trial, and what is said of it."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from swift_agent.agent.processes import import_trial
from swift_agent.agent.processes.import_trial import STARTS_THREADS, Findings, Trial, is_below

Try = Callable[..., Findings]
ENDS = "its import ends the process"


@pytest.fixture
def try_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """Try modules of that content, as the server does, all rounds; nothing of it may be left."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(**contents: str) -> Findings:
        for name, content in contents.items():
            (tmp_path / f"{name}.py").write_text(content)
        found, rest, before = Findings(), tuple(contents), set(psutil.Process().children(recursive=True))
        while rest:
            one = Trial(rest, lambda: None)
            while not (select.select([one], [], [], one.left_s)[0] and one.hear()):
                assert one.left_s, "silent for a minute"
            part, rest = one.findings()
            found.good += part.good
            found.failed |= part.failed
            found.unfit |= part.unfit
        assert set(psutil.Process().children(recursive=True)) <= before
        return found

    return run


@pytest.mark.parametrize(
    ("content", "why"),
    [("import os; os.kill(os.getpid(), 9)", ENDS),
     ("import os; os.closerange(3, 4096); os._exit(0)", ENDS),
     ("import os, time; os.closerange(3, 4096); time.sleep(1000)", ENDS),
     ("import os\nif os.fork(): os._exit(0)", ENDS),
     ("import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
      "it has the ends of processes ignored, for which the server waits"),
     ("import torch; torch.cuda.is_initialized = lambda: True", "it initialises CUDA, which a fork cannot use"),
     ("import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()", STARTS_THREADS)],
    ids=["crashes", "closes files", "closes files and lives", "daemonizes", "ignores ends", "CUDA", "threads"],
)  # fmt: skip
def test_what_makes_a_module_unfit(content: str, why: str, try_: Try) -> None:
    """And says nothing of the others."""
    found = try_(before_it="", culprit=content, after_it="")
    assert (found.unfit, found.failed, found.good) == ({"culprit": why}, {}, ["before_it", "after_it"])


def test_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not blamed before its time, which begins with the last word of the trial."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(import_trial, "TIMEOUT_S", 1000.0)
    (tmp_path / "fine.py").touch()
    (tmp_path / "hangs.py").write_text("import time; time.sleep(1000)")
    one = Trial(["fine", "hangs", "later"], lambda: None)
    assert select.select([one], [], [], 60.0)[0] and 0.0 < one.left_s <= 1000.0
    monkeypatch.setattr(import_trial, "TIMEOUT_S", 0.5)
    assert not one.hear()
    assert not select.select([one], [], [], one.left_s)[0] and not one.left_s
    one.end()
    found, rest = one.findings("it hangs")
    assert (found.good, found.unfit, rest) == (["fine"], {"hangs": "it hangs"}, ("later",))


def test_a_thread_that_has_ended_is_none(try_: Try) -> None:
    """The kernel lists it for a moment longer."""
    short = "import threading\nfor _ in range(20):\n  t = threading.Thread(target=int)\n  t.start()\n  t.join()"
    names = {f"short{number}": short for number in range(20)}
    assert try_(**names).good == list(names)


def test_what_a_module_has_started_ends_with_the_trial(try_: Try, tmp_path: Path) -> None:
    """Nor is its end waited for, though it holds what the trial reports to."""
    pid_file = tmp_path / "pid"
    found = try_(
        starter="import subprocess\np = subprocess.Popen(['sleep', '77'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(p.pid))",
        forks="import os, time\nif not os.fork(): time.sleep(77)",
    )
    assert found.good == ["starter", "forks"]
    deadline_s = time.monotonic() + 10.0
    while psutil.pid_exists(int(pid_file.read_text())) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_modules_that_fail(try_: Try) -> None:
    found = try_(exits="import sys; sys.exit(3)", fails="raise ValueError('x' * (1 << 20))", odd="raise KeyError('a')")
    assert found.failed["exits"] == "SystemExit: 3" and found.failed["odd"] == "KeyError: 'a'"
    assert found.failed["fails"].startswith("ValueError: xxx") and len(found.failed["fails"]) <= 1000
    assert not found.good and not found.unfit


@pytest.mark.parametrize("line", [b"hello", b"3", b'["other", "good", ""]', b'["m", "fine", ""]', b"\xff", b"[]"])
def test_a_module_that_writes_where_the_trial_reports_to(line: bytes) -> None:
    assert import_trial._word(line, "m") == ("m", "unfit", "it writes into files of others")
    assert import_trial._word(b'["m", "good", ""]', "m") == ("m", "good", "")


def test_one_that_nobody_waits_for_any_more() -> None:
    one = Trial(["no_such_module"], lambda: None)
    one.end()
    one.end()
    assert one.findings()[0].unfit == {"no_such_module": ENDS}


def test_a_package_stands_for_all_below_it() -> None:
    assert is_below("a.b", ("a",)) and is_below("a", ("a",)) and is_below("a.b.c", ("x", "a.b"))
    assert not is_below("ab", ("a",)) and not is_below("a", ("a.b",)) and not is_below("a", ())

"""Temporary directories of agents: removed at their end, or by the next agent if they were killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from swift_agent.launch import directories
from swift_agent.launch.checks import ConfigError
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.directories import LOGS_PREFIX, PREFIX, Directories
from swift_rendezvous.store.owned_directory import LOCK_NAME, own, remove_orphans


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /tmp, under another name."""
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        monkeypatch.setattr(directories, "SHORT_PARENT", short)
        yield Path(short)  # type: ignore[misc]


def config(logs: Path, keep_logs: bool = False, message_log: Path | None = None) -> AgentConfig:
    launch = SimpleNamespace(logs_specs=SimpleNamespace(root_log_dir=str(logs)))
    return cast(AgentConfig, SimpleNamespace(
        nproc=2, keep_logs=keep_logs, launch=launch,
        message_log=None if message_log is None else str(message_log)
    ))  # fmt: skip


def logs_in(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=LOGS_PREFIX, dir=parent))


def die(agent: Directories) -> None:
    """What the kernel does for a process that is killed: its locks are gone, its directories are not."""
    while agent._locks:
        os.close(agent._locks.pop())


def test_nothing_is_left_at_the_end(parent: Path) -> None:
    agent = Directories(config(logs_in(parent)))
    assert Path(agent.socket).is_dir() and len(list(parent.iterdir())) == 2
    agent.close()
    assert list(parent.iterdir()) == []
    agent.close()


def test_the_next_agent_removes_what_a_killed_one_has_left(parent: Path) -> None:
    killed, living = Directories(config(logs_in(parent))), Directories(config(logs_in(parent)))
    die(killed)
    (Path(killed.socket) / "agent.sock").touch()
    here = Directories(config(logs_in(parent)))
    assert not Path(killed.socket).exists()
    assert Path(living.socket).is_dir()
    assert len(list(parent.glob(f"{LOGS_PREFIX}*"))) == 2
    living.close()
    here.close()
    assert list(parent.iterdir()) == []


def test_logs_that_the_user_has_named_are_not_touched(parent: Path, tmp_path: Path) -> None:
    agent = Directories(config(tmp_path, keep_logs=True))
    agent.close()
    assert list(tmp_path.iterdir()) == []


def test_logs_of_messages_have_a_directory_of_their_own(parent: Path, tmp_path: Path) -> None:
    place = tmp_path / "disk" / "logs"
    killed, living = (Directories(config(logs_in(parent), message_log=place)) for _ in range(2))
    assert len({killed.messages, living.messages}) == len(list(place.iterdir())) == 2
    die(killed)
    # One of another machine, whose lock is not seen here.
    other = place / f"{PREFIX}elsewhere-1"
    other.mkdir()
    os.close(own(other))
    here = Directories(config(logs_in(parent), message_log=place))
    assert not Path(killed.messages).exists() and Path(living.messages).is_dir() and other.is_dir()
    living.close()
    here.close()
    assert list(place.iterdir()) == [other]
    without = Directories(config(logs_in(parent)))
    assert without.messages == without.socket
    without.close()


def test_a_host_removes_nothing_of_one_whose_name_begins_with_its_own(tmp_path: Path) -> None:
    """On a directory that both share, where locks of one may not be seen by the other."""
    made = {}
    for host in ("n1", "n1-b", "n1-b-c"):
        made[host] = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{host}-", dir=tmp_path))
        os.close(own(made[host]))  # as it looks where the lock is not seen
    remove_orphans(tmp_path, f"{PREFIX}n1-")
    assert not made["n1"].exists() and made["n1-b"].exists() and made["n1-b-c"].exists()
    remove_orphans(tmp_path, f"{PREFIX}n1-b-")
    assert not made["n1-b"].exists() and made["n1-b-c"].exists()


def test_nothing_is_left_if_one_cannot_be_made(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be made: .*Not a directory: .*/file/logs'; .*--message-log"):
        Directories(config(logs_in(parent), message_log=tmp_path / "file" / "logs"))
    assert list(parent.iterdir()) == []


def test_only_owned_directories_without_an_owner_are_removed(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
    (tmp_path / "other").mkdir()
    os.close(own(tmp_path / "other"))
    os.close(own(tmp_path / f"{PREFIX}one"))
    lock = own(tmp_path / f"{PREFIX}two")
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "other")
    remove_orphans(tmp_path, PREFIX)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["other", *(f"{PREFIX}{name}" for name in ("two", "three", "link"))]
    )
    assert (tmp_path / "other" / LOCK_NAME).exists()
    os.close(lock)

"""Where the job's secret comes from, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_agent.launch import secret

SECRET = "correct horse battery staple"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def read(environ: dict[str, str] | None = None, file: str | None = None) -> bytes | None:
    mistakes: list[str] = []
    found = secret.read(environ or {}, file, mistakes)
    assert mistakes == []
    return found


def mistake(environ: dict[str, str] | None = None, file: str | None = None) -> str:
    mistakes: list[str] = []
    assert secret.read(environ or {}, file, mistakes) is None
    (line,) = mistakes
    assert SECRET not in line and "\n" not in line
    return line


def test_every_source_gives_the_same_secret(secret_file: Path) -> None:
    sources = [read(file=str(secret_file)), read({"SWIFT_JOB_SECRET_FILE": str(secret_file)}),
               read({"SWIFT_JOB_SECRET": SECRET}), read({"SWIFT_JOB_SECRET": SECRET + "\n"})]  # fmt: skip
    assert sources == [SECRET.encode()] * 4
    assert read({"SWIFT_JOB_SECRET_FILE": "/elsewhere"}, str(secret_file)) == SECRET.encode()
    assert read() is None and read({"SWIFT_JOB_SECRET_FILE": ""}) is None
    secret_file.write_bytes(bytes(range(256)))
    assert read(file=str(secret_file)) == bytes(range(256))
    # As Kubernetes hands it to a user that is not root.
    secret_file.chmod(0o440)
    assert read(file=str(secret_file)) == bytes(range(256))


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620, 0o644, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(mode: int, secret_file: Path) -> None:
    secret_file.chmod(mode)
    line = mistake(file=str(secret_file))
    assert str(secret_file) in line and "others may read or change it" in line and "chmod 600" in line


@pytest.mark.parametrize("content", ["", "\n", "fifteen bytes..", "fifteen bytes..\n\r\n", "x" * 5000])
def test_one_of_the_wrong_length_is_refused(content: str, secret_file: Path) -> None:
    secret_file.write_text(content)
    word = "too few" if len(content) < 20 else "longer than"
    assert word in mistake(file=str(secret_file))
    assert word in mistake({"SWIFT_JOB_SECRET": content})


def test_what_cannot_be_read_is_refused(secret_file: Path, tmp_path: Path) -> None:
    assert "No such file" in mistake(file=str(tmp_path / "none"))
    assert "No such file" in mistake({"SWIFT_JOB_SECRET_FILE": str(tmp_path / "none")})
    assert "No such file" in mistake(file=""), "an unset variable of a script does not turn the protection off"
    assert "Is a directory" in mistake(file=str(tmp_path))
    assert "cannot be read" in mistake(file="a\0b")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else who may not read the file")
def test_an_unreadable_file_is_refused(secret_file: Path) -> None:
    """Root may read everything, so another user is asked."""
    code = (
        "import os, sys; from swift_agent.launch import secret as job_secret\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "mistakes = []; job_secret.read({}, sys.argv[1], mistakes); print(mistakes)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(secret_file)], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert "Permission denied" in done.stdout and SECRET not in done.stdout, done


def test_two_at_once_are_refused(secret_file: Path) -> None:
    both = {"SWIFT_JOB_SECRET": SECRET, "SWIFT_JOB_SECRET_FILE": str(secret_file)}
    assert "both SWIFT_JOB_SECRET_FILE and SWIFT_JOB_SECRET" in mistake(both)
    assert "both --job-secret-file and SWIFT_JOB_SECRET" in mistake({"SWIFT_JOB_SECRET": SECRET}, str(secret_file))


def test_secrets_are_hidden_from_what_is_started_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_JOB_SECRET", SECRET)
    monkeypatch.setenv("SWIFT_ETCD_PASSWORD", "hunter2hunter2")
    with pytest.raises(KeyboardInterrupt), secret.hidden():
        seen = subprocess.run(["env"], capture_output=True, text=True, timeout=30).stdout
        assert SECRET not in seen and "hunter2" not in seen
        raise KeyboardInterrupt
    assert os.environ["SWIFT_JOB_SECRET"] == SECRET and os.environ["SWIFT_ETCD_PASSWORD"] == "hunter2hunter2"


def test_who_is_warned() -> None:
    open_key = secret.key(None, "gpt", alone=False)
    assert "--job-secret-file" in secret.warning(open_key)
    assert secret.warning(secret.key(SECRET.encode(), "gpt", alone=False)) == ""
    assert secret.warning(secret.key(None, "gpt", alone=True)) == ""

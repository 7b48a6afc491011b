"""Keys that follow from the job's secret: equal where they must be, different everywhere else, and in no text."""

from __future__ import annotations

import itertools

from swift_rendezvous.node.job_key import JobKey

SECRET = b"correct horse battery staple"


def everything(key: JobKey) -> list[str]:
    tokens = [key.store_token(number, nonce) for number in (1, 2) for nonce in ("0" * 32, "1" * 32)]
    return [key.proof, key.heartbeat.hex(), *tokens]


def test_nodes_with_the_same_secret_have_the_same_keys() -> None:
    assert everything(JobKey.of_secret(SECRET, "gpt")) == everything(JobKey.of_secret(SECRET, "gpt"))


def test_no_two_keys_are_equal() -> None:
    keys = [JobKey.of_secret(SECRET, "gpt"), JobKey.of_secret(SECRET + b".", "gpt"), JobKey.of_secret(SECRET, "gpt-2"),
            JobKey.of_one_node(), JobKey.of_one_node()]  # fmt: skip
    values = list(itertools.chain.from_iterable(everything(key) for key in keys))
    assert len(set(values)) == len(values)


def test_names_of_modules_count_only_with_the_jobs_secret() -> None:
    key, names = JobKey.of_secret(SECRET, "gpt"), ("numpy", "torch.optim")
    signed = key.signed_modules(names)
    assert signed[:2] == names and JobKey.of_secret(SECRET, "gpt").modules_of(signed) == names
    assert key.modules_of(key.signed_modules(())) == ()
    for other in (JobKey.of_secret(SECRET, "bert"), JobKey.of_secret(SECRET + b".", "gpt"), JobKey.of_one_node()):
        assert other.modules_of(signed) == () == key.modules_of(other.signed_modules(names))
    for forged in ((), ("",), ("numpy",), ("evil", *signed[1:]), signed[1:], (*names, "\u00e9"), names):
        assert key.modules_of(forged) == ()
    assert key.modules_of(key.signed_modules(("a b", "os"))) == ()
    open_key = JobKey.without_secret("gpt")  # anybody can work out its signature
    assert open_key.modules_of(open_key.signed_modules(names)) == ()


def test_without_a_secret_nothing_is_claimed() -> None:
    key = JobKey.without_secret("gpt")
    assert not key.protected and key.proof == ""
    assert key.heartbeat == JobKey.without_secret("gpt").heartbeat != JobKey.without_secret("bert").heartbeat
    assert JobKey.of_secret(SECRET, "gpt").protected and JobKey.of_one_node().protected


def test_a_key_is_in_no_text() -> None:
    key = JobKey.of_secret(SECRET, "gpt")
    assert repr(key) == str(key) == "JobKey(protected)"
    assert repr(JobKey.without_secret("gpt")) == "JobKey(without a secret)"

"""Which collectives count for an iteration."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from swift_agent import native
from swift_agent.worker.loop.peer_errors import cause_of
from swift_agent.worker.messages.collective_counts import Collectives


class Library:
    num = 7

    refuses = False

    def num_collectives(self) -> int:
        return self.num

    def refuse_collectives(self, refuses: bool) -> None:
        self.refuses = refuses


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(native, "load", lambda: made)
    return made


def test_those_since_the_iteration_began_count(library: Library) -> None:
    collectives = Collectives()
    collectives.begin()
    assert not collectives.why
    library.num += 1
    assert "collective" in collectives.why
    collectives.begin()
    assert not collectives.why


def test_ours_do_not(library: Library) -> None:
    """Nor while they are under way, when another thread may ask; inside others of ours too."""
    collectives = Collectives()
    collectives.begin()
    with pytest.raises(RuntimeError), collectives.aside():
        library.num += 2
        with collectives.aside():
            library.num += 1
            assert not collectives.why
        raise RuntimeError("the agreement was cut")
    assert not collectives.why
    library.num += 1
    with collectives.aside():
        library.num += 1
        assert "collective" in collectives.why
    assert "collective" in collectives.why


def test_without_the_library_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    collectives = Collectives()
    collectives.begin()
    with collectives.aside():
        assert "no compiled library" in collectives.why


def test_who_has_stayed_after_its_update_makes_none_until_the_iteration_is_over(library: Library) -> None:
    collectives = Collectives()
    collectives.begin()
    collectives.refuse()
    with collectives.aside():
        assert not library.refuses
        library.num += 1
    assert library.refuses
    collectives.end()
    assert not library.refuses and not collectives.has_any
    collectives.begin()
    library.num += 1
    collectives.end()
    assert collectives.has_any


REFUSED = "swift-agent: a collective in the rest of an iteration that others may have passed over after a failure"
IN_CALLBACK = "Got the following error when running the callback: RuntimeError:"


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError(REFUSED),
        # Whose type is lost on the way through C++.
        RuntimeError(REFUSED),
        RuntimeError(f"DistBackendError: {REFUSED}"),
        RuntimeError(f"{IN_CALLBACK} DistBackendError: {REFUSED}"),
        RuntimeError(f"{IN_CALLBACK} {REFUSED}"),
    ],
)
def test_what_the_library_raises_for_a_collective_that_it_refuses_is_known(error: Exception) -> None:
    assert "passed over" in Collectives.refusal(error)


def test_a_stage_says_it_by_its_cause() -> None:
    error = RuntimeError("[Stage 1] failed to run forward: args: ()")
    error.__cause__ = dist.DistBackendError(REFUSED)
    assert "passed over" in Collectives.refusal(cause_of(error))


@pytest.mark.parametrize("error", [ValueError(REFUSED), RuntimeError(f"in the log of the last run: {REFUSED}")])
def test_an_error_of_the_script_that_quotes_it_is_the_scripts(error: Exception) -> None:
    assert not Collectives.refusal(error)

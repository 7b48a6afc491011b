"""In what machines differ: what they have in common is left out."""

from __future__ import annotations

import pytest

from swift_recovery.state.machines import kinds_of, unlike


@pytest.mark.parametrize(
    ("text", "others", "named"),
    [
        ("torch 2.13, 1 threads, AVX2", ["torch 2.13, 1 threads, AVX512"], "AVX2"),
        ("torch 2.13, 1 threads, AVX2", ["torch 2.13, 1 threads, AVX512", "torch 2.14, 1 threads, AVX2"],
         "torch 2.13, AVX2"),
        ("torch 2.13", ["torch 2.13, MKL_CBWR=AVX2"], "no MKL_CBWR"),  # nothing of its own
    ],
)  # fmt: skip
def test_only_what_not_all_have_is_named(text: str, others: list[str], named: str) -> None:
    assert unlike(text, others) == named


def test_ranks_of_a_kind_are_named_together() -> None:
    assert kinds_of({3: "AVX2", 0: "AVX512", 1: "AVX2", 2: "AVX2"}) == "rank 0 with AVX512; ranks 1, 2, 3 with AVX2"
    many = kinds_of({rank: "AVX2" if rank else "SVE" for rank in range(1000)})
    assert many == "rank 0 with SVE; ranks 1, 2, 3, 4, 5, 6, 7, 8 and 991 more with AVX2"
    assert kinds_of({0: "AVX2", 1: "AVX2"}) == "" and kinds_of({}) == ""

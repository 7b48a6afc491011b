"""Names of logs: what users may write there, and what becomes of it."""

from __future__ import annotations

import re

import pytest

from swift_agent.launch.log_names import KNOWN, line_prefix, mistake_in, name_of

VALUES = {"role_name": "t", "rank": 17, "local_rank": 1, "host": "h", "node_id": "n", "attempt": 3}


def test_a_name_has_all_that_is_known() -> None:
    assert set(VALUES) == set(KNOWN)
    template = "-".join(f"${{{name}}}" for name in KNOWN)
    assert mistake_in(template, "logs") == ""
    assert name_of(template, VALUES) == "t-17-1-h-n-3"


def test_a_name_never_leaves_the_directory() -> None:
    assert name_of("$rank.$role_name", {**VALUES, "role_name": "../a/b"}) == "17...-a-b"


@pytest.mark.parametrize("template", ["$rank", "${rank}-$attempt", "${node_id}.${local_rank}", "$$5-$rank"])
def test_names_that_are_right(template: str) -> None:
    assert mistake_in(template, "logs") == ""


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("${rank}-${hots}", r"\$\{hots\} is not known; there are \$\{role_name\}, \$\{rank\}"),
        ("${rank", r"a \$ begins one of .*type for example --log-names '\$\{rank\}-\$\{host\}'"),
        ("$5-$rank", r"a \$ begins one of"),
        ("worker", r"would share a name; it needs \$\{rank\}"),
        ("${local_rank}", "would share a name"),
        ("${host}-${local_rank}", "would share a name"),  # two agents may be on one host
        ("a/${rank}", "a name of a file has no /"),
    ],
)
def test_names_that_are_wrong(template: str, said: str) -> None:
    assert re.search(said, mistake_in(template, "logs"))
    assert mistake_in(template, "logs").startswith(f"--log-names {template}: ")


def test_files_that_do_not_stay_need_no_names() -> None:
    assert "type --log-dir DIR" in mistake_in("$rank", None)


def test_prefixes_of_lines() -> None:
    assert line_prefix("[${role_name}${rank}/${local_rank}]:", VALUES) == "[t17/1]:"
    assert line_prefix("${unknown} $rank", VALUES) == "${unknown} 17"
    assert line_prefix("$host/$node_id/$attempt", VALUES) == "h/n/3"

"""Names of logs, in the words of users. Pure.

`--log-names`: what the files of workers are called in `--log-dir`, besides torch's own names.

    LOG_DIR/3-host-a.stderr.log --> JOB_x1y2/attempt_0/1/stderr.log

A link, since torch's `LogsSpecs` decides where files are, and tools of others look for them there. This module must
never open a file.
"""

from __future__ import annotations

import string
from collections.abc import Mapping

KNOWN = ("role_name", "rank", "local_rank", "host", "node_id", "attempt")


def mistake_in(template: str, log_dir: str | None) -> str:
    """Why these cannot be names of files, and what to type; '' if they can."""
    try:
        used = string.Template(template).get_identifiers()
        string.Template(template).substitute(dict.fromkeys(used, ""))
    except ValueError:
        return (
            f"--log-names {template}: a $ begins one of {_listed()}; "
            "type for example --log-names '${rank}-${host}'"
        )
    if unknown := [name for name in used if name not in KNOWN]:
        return f"--log-names {template}: ${{{unknown[0]}}} is not known; there are {_listed()}"
    if "rank" not in used and not {"local_rank", "node_id"} <= {*used}:
        return (
            f"--log-names {template}: workers would share a name; "
            "it needs ${rank}, or ${node_id} and ${local_rank}"
        )
    if "/" in template:
        return f"--log-names {template}: a name of a file has no /; directories are for --log-dir"
    if log_dir is None:
        return f"--log-names {template}: needs a directory that stays; type --log-dir DIR, too"
    return ""


def name_of(template: str, values: Mapping[str, str | int]) -> str:
    """Without its ending. *values*: of all that are `KNOWN`."""
    return string.Template(template).substitute({name: str(value).replace("/", "-") for name, value in values.items()})


def line_prefix(template: str, values: Mapping[str, str | int]) -> str:
    """Of lines on the console, as `TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE` describes it; what is not known stays."""
    return string.Template(template).safe_substitute(values)


def _listed() -> str:
    return ", ".join(f"${{{name}}}" for name in KNOWN)

"""HTML and SVG as values: the one place where text becomes markup. Pure.

Everything that is not `Markup` is escaped, in content and in attributes, so a name out of etcd can never be more than a
name. Must never take a string for markup.
"""

from __future__ import annotations

import html
import re
from typing import TypeAlias

VOID = frozenset({"meta", "br", "hr", "line", "rect", "path", "circle", "polyline", "use"})
# Of a text: what XML does not have, and what turns the direction of the rest of a line.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Markup(str):
    """What is markup already: made by `tag`, `join`, or of a constant of ours."""


Content: TypeAlias = "Markup | str | int | float | None"


def escaped(content: Content) -> Markup:
    """As a text; None is nothing."""
    if content is None:
        return Markup()
    if isinstance(content, Markup):
        return content
    return Markup(html.escape(_CONTROLS.sub("\ufffd", number(content) if isinstance(content, float) else str(content))))


def join(*contents: Content) -> Markup:
    return Markup("".join(map(escaped, contents)))


def tag(name: str, /, *contents: Content, **attributes: Content) -> Markup:
    """An element. An attribute that is None is left out; `_` in a name stands for `-`, one at its end for nothing."""
    assert re.fullmatch(r"[a-z][a-zA-Z0-9]*", name)
    given = [
        f' {attribute.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for attribute, value in attributes.items()
        if value is not None
    ]
    if name in VOID and not contents:
        return Markup(f"<{name}{''.join(given)}/>")
    return Markup(f"<{name}{''.join(given)}>{join(*contents)}</{name}>")


def number(value: float) -> str:
    """Of a coordinate: two digits after the point are enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".")

"""What the body of the script's loop carries on from one iteration to the next, by its source.

    n += 1 | mean = 0.9 * mean + x | for i, batch in enumerate(...)  -->  and what is worked out from these

In a replacement these start over in the middle of the loop. The loops in question are those around the call of the
iteration; what each turn of such a loop sets before all else is not carried. This module must never run anything of the
script's, and says nothing of a source that it does not understand.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COUNTED = ("range", "count")


class LoopBody:
    """*source*: of a file. *line*: where in it the iteration is called."""

    def __init__(self, source: str, line: int) -> None:
        self._module = ast.parse(source)
        self._line = line
        around = [node for node in ast.walk(self._module) if isinstance(node, _FUNCTIONS) and _has(node, line)]
        self._nodes = list(_inside(max(around, key=lambda one: one.lineno, default=self._module)))
        self.carried = self._carried()

    def given(self, function: str, position: int, name: str) -> bool:
        """Whether the argument of the iteration, that *function*, which is at that *position*, or has that *name*, is
        carried."""
        calls = [call for call in self._nodes if isinstance(call, ast.Call) and _has(call, self._line)]
        calls = [call for call in calls if _function(call) == function] or calls
        found = [one for call in calls for one in _argument(call, position, name)]
        return any(not self.carried.isdisjoint(_names(one)) for one in found)

    def advances(self, name: str) -> bool:
        """Whether a variable (`n`), an attribute (`self.n`) or a key (`state['n']`) is carried; these by whatever
        function of the file."""
        if name.isidentifier():
            return name in self.carried or any(
                name in _declared(function) and any(name in _advanced(node) for node in _inside(function))
                for function in ast.walk(self._module)
                if isinstance(function, ast.FunctionDef)
            )
        try:
            end = ast.parse(name, mode="eval").body
        except SyntaxError:  # no name of a script's
            return False
        return any(_end(end) == _end(target) for node in ast.walk(self._module) for target in _advanced_parts(node))

    def _carried(self) -> set[str]:
        carried = set[str]()
        loops = [node for node in self._nodes if isinstance(node, (ast.For, ast.While)) and _has(node, self._line)]
        for loop in loops:
            first_set = dict.fromkeys(_targets(loop), loop.lineno)
            for statement in _each_turn(loop.body):
                for name in _set_by(statement):
                    first_set.setdefault(name, statement.lineno)
            nested = [one for one in loops if _has(loop, one.lineno) and one is not loop]
            for node in _inside(loop):
                line = getattr(node, "lineno", 0)
                if any(_has(one, line) for one in nested):
                    continue  # told by the innermost
                carried |= {name for name in _advanced(node) if first_set.get(name, line) >= line}
            carried |= _counted(loop)
        inside = [node for loop in loops for node in _inside(loop)]
        while more := {
            name for node in inside for name in _set_by(node) if not carried.isdisjoint(_names(node))
        } - carried:
            carried |= more
        return carried


def _has(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", None) or 0)


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """But for functions and classes in it."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, _SCOPES):
            yield node
            yield from _inside(node)


def _each_turn(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that each turn of a loop comes to."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.With):
            yield from _each_turn(statement.body)


def _targets(loop: ast.For | ast.While) -> set[str]:
    target = loop.target if isinstance(loop, ast.For) else None
    return {one.id for one in ast.walk(target) if isinstance(one, ast.Name)} if target is not None else set()


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _set_by(node: ast.AST) -> set[str]:
    """Variables that a statement sets to something of which they are no part."""
    if isinstance(node, ast.Assign):
        found = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        return found - _names(node)
    if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
        return {node.target.id} - _names(node.value)
    return set()


def _advanced(node: ast.AST) -> set[str]:
    return {target.id for target in _advanced_parts(node) if isinstance(target, ast.Name)}


def _advanced_parts(node: ast.AST) -> list[ast.expr]:
    """What a statement sets to something that was made of its old value."""
    if isinstance(node, ast.AugAssign):
        return [node.target]
    if isinstance(node, ast.Assign):
        kinds = (ast.Name, ast.Attribute, ast.Subscript)
        old = [ast.unparse(one) for one in ast.walk(node.value) if isinstance(one, kinds)]
        parts = [part for target in node.targets for part in getattr(target, "elts", [target])]
        return [part for part in parts if ast.unparse(part) in old]
    return []


def _end(node: ast.expr) -> tuple[str, object] | None:
    """The attribute or the key."""
    if isinstance(node, ast.Attribute):
        return "attribute", node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return "key", node.slice.value
    return None


def _counted(loop: ast.For | ast.While) -> set[str]:
    """Its variables that count the turns, from where each process begins."""
    if isinstance(loop, ast.While):
        return set()
    call, target = loop.iter, loop.target
    while isinstance(call, ast.Call) and getattr(call.func, "id", "") == "tqdm" and call.args:
        call = call.args[0]
    if not isinstance(call, ast.Call) or not isinstance(target, ast.Tuple):
        return set()
    counts = list[bool]()
    if getattr(call.func, "id", "") == "enumerate":
        counts = [len(call.args) == 1 and not call.keywords]
    elif getattr(call.func, "id", "") == "zip":
        counts = [_function(one) in _COUNTED for one in call.args]
    return {one.id for one, does in zip(target.elts, counts, strict=False) if does and isinstance(one, ast.Name)}


def _function(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return str(getattr(node.func, "id", "") or getattr(node.func, "attr", ""))


def _declared(function: ast.FunctionDef) -> set[str]:
    return {name for node in _inside(function) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}


def _argument(call: ast.Call, position: int, name: str) -> list[ast.expr]:
    found = [keyword.value for keyword in call.keywords if keyword.arg == name]
    if position < len(call.args) and not any(isinstance(one, ast.Starred) for one in call.args[: position + 1]):
        found.append(call.args[position])
    return found

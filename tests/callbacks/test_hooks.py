"""The protocol of the hooks names the arguments that a run passes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from thunder_memsave.callbacks.hooks import HOOKS

ROOT = Path(__file__).parents[2]


def calls_by_name() -> Iterator[tuple[str, set[str]]]:
    """Find every `fabric.call("on_...", ...)` of the source, with its arguments."""
    for folder in ("strategy", "callbacks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("fabric.call"):
                    (hook, *rest) = node.args
                    if isinstance(hook, ast.Constant):
                        assert not rest
                        yield str(hook.value), {str(each.arg) for each in node.keywords}


def test_hooks_that_are_called_by_name_get_what_the_protocol_names() -> None:
    found = dict(calls_by_name())
    assert found == {name: set(HOOKS[name]) for name in found}
    assert found.keys() == {"on_save_checkpoint", "on_rollback_start", "on_exception"}

"""The documentation strings of the Python standard library, read from its source files."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Tests and bundled packages are not documentation; `idlelib` and `lib2to3` are programs.
_LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3", "ensurepip", "__pycache__"}

_VALIDATION_SHARE = 10  # one in ten


@dataclass(frozen=True, kw_only=True)
class Docstring:
    """One documented module, class or function."""

    name: str
    """Such as `textwrap.dedent`."""

    kind: str
    """`module`, `class` or `function`."""

    text: str

    @property
    def summary(self) -> str:
        """The first paragraph as one line."""
        return " ".join(self.text.split("\n\n")[0].split())

    @property
    def held_out(self) -> bool:
        """Whether this one is held out for validation; the same on every machine."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return digest[0] % _VALIDATION_SHARE == 0


def standard_library_docstrings() -> list[Docstring]:
    """Read every public docstring, without importing anything."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Docstring] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _LEFT_OUT.intersection(relative.parts):
            found.update((docstring.name, docstring) for docstring in _of_file(path, relative))
    return list(found.values())


def _of_file(path: Path, relative: Path) -> Iterator[Docstring]:
    parts = [part for part in relative.with_suffix("").parts if part != "__init__"]
    if not parts or any(part.startswith("_") for part in parts):
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return  # some files of the library are examples of such errors
    yield from _of_node(tree, ".".join(parts))


def _of_node(node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str) -> Iterator[Docstring]:
    text = ast.get_docstring(node)
    if text and re.search(r"[a-z]", text):
        kinds = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "function"}
        yield Docstring(name=name, kind=kinds[type(node)], text=text)
    if isinstance(node, ast.FunctionDef):
        return
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            yield from _of_node(child, f"{name}.{child.name}")

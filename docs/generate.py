"""Writes the parts of the documentation that the code knows: all keys, and other tools' names for them.

python docs/generate.py      # a test fails when this was forgotten
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

from thunder_memsave.config import CompileConfig, ShardingConfig, StrategyConfig
from thunder_memsave.finetune import data
from thunder_memsave.finetune.config import RunConfig
from thunder_memsave.finetune.run_file.foreign_names import FOREIGN_NAMES, ForeignName

DOCS = Path(__file__).parent

TOOLS = {"axolotl": "axolotl", "litgpt": "litgpt", "trl": "TRL"}

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

_INTRODUCTION = """\
# Every key of a run file

Written by `docs/generate.py` from the dataclasses that read the file. Needed are `model.name_or_path`, `data.dataset`
and `output_dir`; an unknown key is refused, with the nearest that there is. On the command line, a key is
`--section.key=value`. Values are YAML; `1e-4` is a number.
"""

_RESERVED = """\
## Reserved

`memory` and `fp8` are the names of sections to come; in this version they have no keys, and setting them is an error.
"""


def main() -> None:
    """Write every page that has generated parts."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


def pages() -> dict[Path, str]:
    """Make the pages as they should be."""
    made = {DOCS / "config_reference.md": config_reference()}
    for name in TOOLS:
        path = DOCS / f"coming_from_{name}.md"
        made[path] = _TABLE.sub(_filled, path.read_text(encoding="utf-8"))
    return made


def config_reference() -> str:
    """Describe all sections, each key with its type, default and docstring."""
    sections = {name: hint for name, hint in get_type_hints(RunConfig).items() if _is_section(hint)}
    parts = [_INTRODUCTION, "## At the top level\n", _key_table(RunConfig, leave_out=sections)]
    for name, section in sections.items():
        parts += [f"## `{name}`\n", _first_line(section), _key_table(section)]
    parts += [
        "## `strategy`\n",
        "Also the arguments of `ThunderMemsaveStrategy`.\n",
        _strategy_table(),
    ]
    parts += ["## `data.dataset`\n", *_datasets(), _RESERVED]
    return "\n".join(parts)


def foreign_table(tool: str) -> str:
    """List a tool's keys and ours for them."""
    rows = [
        f"| `{key}` | {_ours(name)} | {_cell(name.note)} |"
        for key, name in FOREIGN_NAMES.items()
        if tool in name.tools
    ]
    return "\n".join([f"| {tool} | here | |", "|---|---|---|", *rows])


def _filled(match: re.Match[str]) -> str:
    return f"{match[1]}{foreign_table(TOOLS[match[2]])}\n{match[3]}"


def _ours(name: ForeignName) -> str:
    return ", ".join(f"`{key}`" for key in name.here) or "not here"


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _first_line(section: Any) -> str:
    return f"{(section.__doc__ or '').splitlines()[0]}\n"


def _key_table(section: Any, leave_out: Any = ()) -> str:
    fields = [field for field in dataclasses.fields(section) if field.name not in leave_out]
    return _table(_rows(section, fields))


def _strategy_table() -> str:
    """The keys of three dataclasses, which stand side by side in YAML."""
    rows = []
    for section in (ShardingConfig, CompileConfig, StrategyConfig):
        fields = [f for f in dataclasses.fields(section) if f.name not in ("sharding", "compile")]
        rows += list(_rows(section, fields))
    return _table(iter(row.replace("`mode`", "`sharding`", 1) for row in rows))


def _table(rows: Iterator[str]) -> str:
    return "\n".join(["| key | values | default | meaning |", "|---|---|---|---|", *rows, ""])


def _rows(section: Any, fields: list[dataclasses.Field[Any]]) -> Iterator[str]:
    docs = _field_docs(section)
    for field in fields:
        values = _cell(_type_text(section, field.name))
        cells = (f"`{field.name}`", values, _default(field), _cell(docs[field.name]))
        yield f"| {' | '.join(cells)} |"


def _field_docs(section: Any) -> dict[str, str]:
    """Read the string under each field, which Python itself forgets."""
    (body,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(body, ast.ClassDef)
    docs, name = {}, None
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            docs[name] = ""
        elif (
            name is not None and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            docs[name] = inspect.cleandoc(str(node.value.value))
    return docs


_TYPE_WORDS = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true, false",
    "None": "null",
    "ClassSpec": "class",
    "list[ClassSpec]": "list of classes",
    "dict[str, Any]": "mapping",
    "tuple[str, ...]": "list of names",
    "timedelta": "duration, such as `30min`",
}


def _type_text(section: Any, key: str) -> str:
    """Write an annotation in the words of somebody who writes YAML."""
    annotation = str(section.__annotations__[key])
    literals = re.findall(r"Literal\[([^\]]*)\]", annotation)
    choices = [
        f"`{choice}`" for found in literals for choice in re.findall(r"['\"](\w+)['\"]", found)
    ]
    others = re.sub(r"Literal\[[^\]]*\]", "", annotation).split(" | ")
    words = [_TYPE_WORDS[other.strip()] for other in others if other.strip()]
    return ", ".join([*choices, *words])


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value == "" or (isinstance(value, dict) and value.get("class_path") == ""):
        return "needed"
    if isinstance(value, timedelta):
        return f"`{round(value.total_seconds() / 60)}min`"
    if isinstance(value, dict) and "class_path" in value:
        arguments = ", ".join(f"{key}: {each}" for key, each in value["init_args"].items())
        return f"`{value['class_path']}` with `{arguments}`"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _datasets() -> Iterator[str]:
    for cls in (data.ChatJSONL, data.PromptJSONL, data.TextJSONL, data.PlainText):
        signature = ", ".join(
            str(parameter).replace("'", "").replace(" | None", "")
            for parameter in inspect.signature(cls).parameters.values()
        )
        yield f"- `{cls.__name__}({signature})`: {_cell(inspect.cleandoc(cls.__doc__ or ''))}"
    yield ""


if __name__ == "__main__":
    main()

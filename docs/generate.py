"""Writes the pages that follow from the code: all keys, and other tools' names for them.

python docs/generate.py      # a test fails if this was forgotten
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

from thunder_memsave.finetune import data
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.keys.foreign_name import ForeignName
from thunder_memsave.finetune.run_file.keys.foreign_names import FOREIGN_NAMES
from thunder_memsave.finetune.run_file.keys.key_help import KeyHelp, sections
from thunder_memsave.settings.schema import bare, hints_of

DOCS = Path(__file__).parent

TOOLS = {"axolotl": "axolotl", "litgpt": "litgpt", "trl": "TRL"}

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

_INTRODUCTION = """\
# Every key of a run file

`docs/generate.py` writes this page from the dataclasses that read the file. `model.name_or_path`, `data.dataset` and
`output_dir` are required. An unknown key is an error that names the nearest known key. On the command line, a key is
`--section.key=value`. Values are YAML; `1e-4` is a number. Bytes are an integer, or a number and a unit: `1.3GiB` and
`1.3G` are 1.3 x 1024^3 (a single letter means the same as in Docker and Slurm), `1.4GB` is 1.4 x 10^9. The result is
rounded down to whole bytes.
"""

_TABLE_HEAD = "| key | values | default | meaning |\n|---|---|---|---|"

_STRATEGY = "Also the arguments of `ThunderMemsaveStrategy`."
_MEMORY = "Also the argument `memory` of `ThunderMemsaveStrategy`, a mapping."
_FP8 = (
    "Also the argument `fp8` of `ThunderMemsaveStrategy`. Without the section nothing runs in fp8; `fp8: {}` "
    "takes the defaults. What runs where: [fp8](fp8.md)."
)


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
    """Describe all sections, each key with its values, default and meaning."""
    parts = [_INTRODUCTION]
    for section, keys in sorted(sections().items(), key=lambda pair: pair[0] != ""):
        rows = [_row(each) for each in keys]
        parts += [_heading(section), "\n".join([_TABLE_HEAD, *rows, ""])]
    return "\n".join([*parts, "## `data.dataset`\n", *_datasets()])


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


def _heading(section: str) -> str:
    if not section:
        return "## At the top level\n"
    cls = bare(hints_of(RunConfig)[section])
    also = {"strategy": _STRATEGY, "memory": _MEMORY, "fp8": _FP8}
    about = also.get(section, cls.__doc__)
    return f"## `{section}`\n\n{inspect.cleandoc(about or '').splitlines()[0]}\n"


def _row(each: KeyHelp) -> str:
    name = each.key.rpartition(".")[2]
    values = re.sub(r"'(\w+)'", r"`\1`", each.wanted)
    default = f"`{each.default}`" if each.default else "needed"
    return f"| `{name}` | {_cell(values)} | {_cell(default)} | {_cell(each.meaning)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _datasets() -> Iterator[str]:
    for cls in (data.ChatJSONL, data.PromptJSONL, data.TextJSONL, data.PlainText):
        arguments = ", ".join(map(_argument, inspect.signature(cls).parameters.values()))
        yield f"- `{cls.__name__}` ({arguments}): {_cell(inspect.cleandoc(cls.__doc__ or ''))}"
    yield ""


def _argument(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return f"`{parameter.name}`"
    return f"`{parameter.name}: {json.dumps(parameter.default)}`"


if __name__ == "__main__":
    main()

"""The help text of every key of a run file, for a terminal."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from docstring_parser import parse_from_object

from thunder_memsave.finetune.run_file.config import ClassSpec, OptimizerSpec, RunConfig
from thunder_memsave.settings.schema import bare, hints_of
from thunder_memsave.settings.value_kinds import is_section, wanted
from thunder_memsave.settings.yaml_file import PlainDumper

_WIDTH = 100

# Descriptions of our own types for somebody who writes YAML.
_OWN_WORDS: dict[Any, str] = {
    ClassSpec: "a class",
    OptimizerSpec: "a class",
    ClassSpec | None: "a class or null",
    list[ClassSpec]: "a list of classes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyHelp:
    """One key."""

    key: str
    """Dotted name."""

    wanted: str
    """Description of the accepted values."""

    default: str
    """Default as YAML; empty if the key is required."""

    meaning: str


def key_helps(cls: Any = RunConfig, *, where: str = "") -> Iterator[KeyHelp]:
    """Yield the help of every key, in the order of the run file."""
    meanings, defaults = _meanings(cls), cls()
    for name, hint in hints_of(cls).items():
        key, inner = f"{where}{name}", bare(hint)
        if not is_section(inner):
            yield KeyHelp(
                key=key,
                wanted=_OWN_WORDS.get(hint) or wanted(hint),
                default=_default(getattr(defaults, name), hint),
                meaning=meanings[name],
            )
        elif inner.shorthand:
            yield _with_shorthand(inner, key=key)
        else:
            yield from key_helps(inner, where=f"{key}.")


def _with_shorthand(cls: Any, *, key: str) -> KeyHelp:
    """Describe a section that is mostly written as the value of its first key."""
    first, *others = key_helps(cls)
    names = "".join(f", {each.key}: ..." for each in others)
    return dataclasses.replace(
        first,
        key=key,
        wanted=f"{first.wanted}, or {{{first.key}: ...{names}}}",
        meaning=" ".join([first.meaning, *(f"{each.key}: {each.meaning}" for each in others)]),
    )


def sections() -> dict[str, list[KeyHelp]]:
    """Collect the keys of each section; those at the top level are under the empty name."""
    found: dict[str, list[KeyHelp]] = {}
    for each in key_helps():
        found.setdefault(each.key.rpartition(".")[0], []).append(each)
    return found


def help_text() -> str:
    """Write all keys under the headings of their sections."""
    # The keys without a section come last: they would be lost between the sections.
    ordered = sorted(sections().items(), key=lambda pair: pair[0] == "")
    return "\n\n".join(_section_text(name, keys) for name, keys in ordered)


def _section_text(name: str, keys: list[KeyHelp]) -> str:
    return "\n".join([f"{name}:" if name else "run:", *map(_key_text, keys)])


def _key_text(each: KeyHelp) -> str:
    default = f"default {each.default}" if each.default else "needed"
    meaning = textwrap.fill(
        each.meaning.replace("`", ""),
        width=_WIDTH,
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return f"  --{each.key}  [{each.wanted}; {default}]\n{meaning}"


def _meanings(cls: Any) -> dict[str, str]:
    """Collect the texts under the fields of a dataclass and of those that it derives from."""
    found = [
        each
        for base in filter(is_section, inspect.getmro(cls))
        for each in parse_from_object(base).params
    ]
    return {each.arg_name: " ".join((each.description or "").split()) for each in found}


def _default(value: Any, hint: Any) -> str:
    if value == "" or (hint is ClassSpec and not value["class_path"]):
        return ""
    text = yaml.dump(
        value, Dumper=PlainDumper, default_flow_style=True, width=1000, sort_keys=False
    )
    return text.removesuffix("...\n").strip()

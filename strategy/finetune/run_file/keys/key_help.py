"""The help text of every key of a run file, for a terminal."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_type_hints

import yaml
from docstring_parser import parse_from_object

from thunder_memsave.config import CompileConfig, ShardingConfig, StrategyConfig
from thunder_memsave.finetune.run_file.config import ClassSpec, RunConfig
from thunder_memsave.finetune.run_file.own_sections import OWN_SECTIONS
from thunder_memsave.settings.section import Bytes, BytesOrFraction, Whole
from thunder_memsave.settings.value_kinds import wanted

_WIDTH = 100

# Descriptions of our own types for somebody who writes YAML.
_OWN_WORDS: dict[Any, str] = {
    ClassSpec: "a class",
    ClassSpec | None: "a class or null",
    list[ClassSpec]: "a list of classes",
    timedelta: "a duration",
    Bytes | Literal["auto"]: "auto or bytes, such as 256MiB",
    BytesOrFraction: "bytes or a part, such as 80%",
    Whole: "a whole number, 0 too",
    BytesOrFraction | Literal["auto"]: "auto, bytes such as 60GiB, or a part such as 80%",
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
    meanings = _meanings(cls)
    hints, defaults = get_type_hints(cls), cls()
    for field in dataclasses.fields(cls):
        key, hint = f"{where}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from key_helps(hint, where=f"{key}.")
            continue
        if key == "strategy":
            yield from _strategy_helps()
            continue
        if (own := OWN_SECTIONS.get(key)) is not None:
            yield from key_helps(own.config, where=f"{key}.")
            continue
        yield KeyHelp(
            key=key,
            wanted=_wanted(hint),
            default=_default(getattr(defaults, field.name), hint),
            meaning=meanings[field.name],
        )


def _strategy_helps() -> Iterator[KeyHelp]:
    """Yield the keys of the strategy, which YAML has without the classes that group them."""
    sharding, size = key_helps(ShardingConfig)
    yield dataclasses.replace(
        sharding,
        key="strategy.sharding",
        wanted=f"{sharding.wanted}, or {{mode: hybrid, size: 8}}",
        meaning=f"{sharding.meaning} size: {size.meaning}",
    )
    yield from key_helps(CompileConfig, where="strategy.")
    hints, meanings = get_type_hints(StrategyConfig), _meanings(StrategyConfig)
    for field in dataclasses.fields(StrategyConfig):
        name, default = field.name, getattr(StrategyConfig(), field.name)
        if dataclasses.is_dataclass(hints[name]) or name in OWN_SECTIONS:  # listed by themselves
            continue
        yield KeyHelp(
            key=f"strategy.{name}",
            wanted=_wanted(hints[name]),
            default=_default("30min" if isinstance(default, timedelta) else default, hints[name]),
            meaning=meanings[name],
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
    """Collect the texts under the fields of a dataclass."""
    found = parse_from_object(cls).params
    return {each.arg_name: " ".join((each.description or "").split()) for each in found}


def _wanted(hint: Any) -> str:
    return _OWN_WORDS.get(hint) or wanted(hint)


def _default(value: Any, hint: Any) -> str:
    if value == "" or (hint is ClassSpec and not value["class_path"]):
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
    return text.removesuffix("...\n").strip()

"""Changes keys in the text of a run file, and leaves its comments and its other lines as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from thunder_memsave.finetune.run_file.reading.arguments import Argument
from thunder_memsave.finetune.run_file.reading.overrides import apply_override
from thunder_memsave.settings.yaml_file import PlainDumper, PlainLoader, parse_yaml


def with_overrides(text: str, overrides: Sequence[Argument]) -> str:
    """Return the text of a run file with keys overridden.

    Args:
        text: A valid run file.
        overrides: As on the command line.

    Raises:
        ConfigError: there is no such key, or a value is not YAML.
    """
    values = parse_yaml(text)
    for override in overrides:
        apply_override(values, override)
        text = _with_value(text, override.key.split("."), values)
    if parse_yaml(text) != values:  # written in a way that only the whole can be rewritten
        return yaml.dump(values, Dumper=PlainDumper, sort_keys=False, allow_unicode=True)
    return text


def without_key(text: str, key: str) -> str:
    """Return the text of a run file without a key of a block, such as `model.architecture`, and its lines."""
    *sections, last = key.split(".")
    node = _compose(text)
    for section in sections:
        found = _value_of(node, section)
        if found is None:
            return text
        node = found
    for name, value in node.value:
        if name.value == last:
            start = text.rindex("\n", 0, name.start_mark.index) + 1
            end = text.find("\n", _end(value))
            return text[:start] + text[end + 1 :]
    return text


def _with_value(text: str, path: Sequence[str], values: Any) -> str:
    """Write one value, at the innermost place on its path that the text has."""
    node = _compose(text)
    for depth, name in enumerate(path):
        values = values[name]
        found = _value_of(node, name)
        if found is None:
            return _inserted(text, node, f"{name}: {_flow(values)}")
        if depth == len(path) - 1 or not isinstance(found, yaml.MappingNode):
            return _replaced(text, node, name, _flow(values))
        node = found
    return text


def _compose(text: str) -> yaml.MappingNode:
    node = yaml.compose(text, Loader=PlainLoader)
    assert isinstance(node, yaml.MappingNode), "a run file is a mapping"
    return node


def _value_of(node: Any, name: str) -> Any:
    return next((value for key, value in node.value if key.value == name), None)


def _replaced(text: str, node: yaml.MappingNode, name: str, shown: str) -> str:
    ((key, value),) = (pair for pair in node.value if pair[0].value == name)
    start = value.start_mark.index
    if isinstance(value, yaml.CollectionNode) and not value.flow_style:
        start = text.index(":", key.end_mark.index) + 1
        shown = f" {shown}"
    return text[:start] + shown + text[_end(value) :]


def _inserted(text: str, node: yaml.MappingNode, entry: str) -> str:
    if node.flow_style:
        end = node.end_mark.index - 1
        return f"{text[:end]}{', ' if node.value else ''}{entry}{text[end:]}"
    first, last = node.value[0][0], node.value[-1][1]
    end = text.find("\n", _end(last))
    end = len(text) if end < 0 else end
    return f"{text[:end]}\n{' ' * first.start_mark.column}{entry}{text[end:]}"


def _end(node: yaml.Node) -> int:
    """Return where a value ends; PyYAML's own end of a block is the start of what follows it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _flow(value: Any) -> str:
    """Write a value in one line."""
    text = yaml.dump(
        value,
        Dumper=PlainDumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
    )
    return text.removesuffix("...\n").strip()

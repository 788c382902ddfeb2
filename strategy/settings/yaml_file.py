"""Reads a YAML file of settings with the line of each key, and refuses all but plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from thunder_memsave.settings.problems import ConfigError, ConfigErrors
from thunder_memsave.settings.quantities import format_duration

# A few lines of aliases of aliases can stand for billions of values.
_MAX_VALUES = 50_000
_MAX_DEPTH = 100
"""Values within values. Python's own limit is not asked: inductor raises it in processes that compile."""

# PyYAML follows YAML 1.1, where a number with an exponent needs a dot and a sign.
_EXPONENT_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+")

_PLAIN_TAGS: dict[type[yaml.Node], tuple[str, ...]] = {
    yaml.MappingNode: ("map",),
    yaml.SequenceNode: ("seq",),
    yaml.ScalarNode: ("str", "int", "float", "bool", "null"),
}
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, kw_only=True, slots=True)
class YamlFile:
    """The values of a file, and the lines of its keys."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]
    """Line of each key by its dotted name, such as `train.epochs` or `loggers[0].class_path`."""

    problems: tuple[ConfigError, ...]
    """Keys given twice, and keys that are no names."""


class PlainLoader(yaml.SafeLoader):
    """Reads YAML's plain values: `1e-4` is a number, `2026-11-21` a text."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read a value.

        Raises:
            RecursionError: it is in more than `_MAX_DEPTH` others.
        """
        if self._depth > _MAX_DEPTH:
            raise RecursionError
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class PlainDumper(yaml.SafeDumper):
    """Writes values that `PlainLoader` reads back: a text that looks like `1e-4` gets quotes."""


PlainDumper.add_representer(
    timedelta, lambda dumper, value: dumper.represent_str(format_duration(value))
)


for _resolver in (PlainLoader, PlainDumper):
    _resolver.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in entries if not tag.endswith(":timestamp")]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"^{_EXPONENT_NUMBER.pattern}$"), list("-+0123456789")
    )


def read_yaml(path: str | Path) -> YamlFile:
    """Read a YAML mapping with the line of each key; an empty file is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    path = Path(path)
    reading = _Reading(path=path)
    values = reading.read(_text(path))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(
            f"the file is a {_kind(values)}, but must be a mapping of names to values, such as "
            "'output_dir: runs/first'.",
            place=f"{path}:1",
        )
    return YamlFile(path=path, values=values, lines=reading.lines, problems=tuple(reading.problems))


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping; refuse a key given twice, where YAML would keep the last one.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping of names.
    """
    file = read_yaml(path)
    if file.problems:
        raise ConfigErrors(file.problems)
    return file.values


def parse_yaml(text: str) -> Any:
    """Read one value, such as the right side of a command-line override.

    Raises:
        ConfigError: the text is not YAML, or not plain data.
    """
    reading = _Reading(path=None)
    value = reading.read(text)
    if reading.problems:
        raise ConfigErrors(reading.problems)
    return value


def _text(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name the YAML file itself.", place=str(path))
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a text in UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}); "
            "is it a YAML file?",
            place=str(path),
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror or error}.", place=str(path)
        ) from error


def _kind(value: object) -> str:
    return "list" if isinstance(value, list) else f"single value ({value!r})"


@dataclass
class _Reading:
    """One pass over a YAML text."""

    path: Path | None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[ConfigError] = field(default_factory=list)
    _num_values: int = 0
    _open: list[yaml.Node] = field(default_factory=list)

    def read(self, text: str) -> Any:
        try:
            loader = PlainLoader(text)
            try:
                node = loader.get_single_node()
                return None if node is None else self._value(loader, node, where="")
            finally:
                loader.dispose()
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            message = f"this is not YAML: it has the character {error.character:#06x}."
            raise self._error(message, line) from error
        except yaml.YAMLError as error:
            raise self._syntax_error(error) from error
        except RecursionError as error:
            raise self._error("the YAML is nested too deeply.", None) from error
        except (KeyError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            # A value that is a number by its tag or by YAML 1.1, but cannot be read as one.
            raise self._error(f"this is not YAML: {error}.", None) from error

    def _value(self, loader: yaml.SafeLoader, node: yaml.Node, *, where: str) -> Any:
        self._num_values += 1
        line = node.start_mark.line + 1
        if self._num_values > _MAX_VALUES:
            message = f"the YAML stands for more than {_MAX_VALUES} values, because aliases repeat others; write the "
            raise self._error(f"{message}values out.", line)
        if any(node is other for other in self._open):
            raise self._error("a YAML alias contains itself.", line)
        self._refuse_tag(node, line)
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(loader, node, where=where)
            if isinstance(node, yaml.SequenceNode):
                return [
                    self._item(loader, item, where=f"{where}[{index}]")
                    for index, item in enumerate(node.value)
                ]
            return self._scalar(loader, node)
        finally:
            self._open.pop()

    def _scalar(self, loader: yaml.SafeLoader, node: yaml.Node) -> Any:
        value = loader.construct_object(node)
        if isinstance(value, str) and "\0" in value:
            message = f"the text {value!r} has a null character, which no name can hold; remove it."
            raise self._error(message, node.start_mark.line + 1)
        return value

    def _item(self, loader: yaml.SafeLoader, node: yaml.Node, *, where: str) -> Any:
        self.lines[where] = node.start_mark.line + 1
        return self._value(loader, node, where=where)

    def _mapping(
        self, loader: yaml.SafeLoader, node: yaml.MappingNode, *, where: str
    ) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        first_lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                for other in self._merged(loader, value_node, where=where):
                    merged = {**merged, **other}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self._key(loader, key_node, where=where)
            if key is None:
                continue
            name, line = f"{where}.{key}" if where else str(key), key_node.start_mark.line + 1
            if key in first_lines:
                message = (
                    f"{name} is given twice, on lines {first_lines[key]} and {line}; remove one."
                )
                self.problems.append(self._error(message, line, key=name))
                continue
            first_lines[key] = self.lines[name] = line
            own[key] = self._value(loader, value_node, where=name)
        return {**merged, **own}

    def _merged(
        self, loader: yaml.SafeLoader, node: yaml.Node, *, where: str
    ) -> Iterator[dict[Any, Any]]:
        nodes = reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]
        for each in nodes:
            value = self._value(loader, each, where=where)
            if not isinstance(value, dict):
                message = f"'<<' merges mappings only, not {value!r}."
                raise self._error(message, each.start_mark.line + 1)
            yield value

    def _key(self, loader: yaml.SafeLoader, node: yaml.Node, *, where: str) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            whose = f" of {where}" if where else ""
            message = f"a key{whose} is a list or a mapping, but must be a name; put a text with braces into quotes."
            self.problems.append(self._error(message, node.start_mark.line + 1))
            return None
        self._refuse_tag(node, node.start_mark.line + 1)
        key = loader.construct_object(node)
        # YAML 1.1 reads the names on, off, yes and no as true and false.
        return node.value if key is None or isinstance(key, bool) else key

    def _refuse_tag(self, node: yaml.Node, line: int) -> None:
        if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN_TAGS[type(node)]:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            message = f"the YAML tag {tag} is refused; a run file holds plain values only."
            raise self._error(message, line)

    def _syntax_error(self, error: yaml.YAMLError) -> ConfigError:
        mark = getattr(error, "problem_mark", None)
        text = getattr(error, "problem", None) or str(error)
        hint = "; indent with spaces" if r"'\t'" in text else ""
        line = None if mark is None else mark.line + 1
        return self._error(f"this is not YAML: {text}{hint}.", line)

    def _error(self, message: str, line: int | None, *, key: str | None = None) -> ConfigError:
        place = None if self.path is None else str(self.path)
        if place is not None and line is not None:
            place = f"{place}:{line}"
        return ConfigError(message, key=key, place=place)

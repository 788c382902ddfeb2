"""The run files that come with the package: their names, their texts, and copies of them."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

from thunder_memsave.settings.problems import ConfigError, suggestion

_ENDINGS = (".yaml", ".yml")


def shipped_configs() -> dict[str, Path]:
    """Map the name of each shipped run file to its path."""
    directory = Path(str(files("thunder_memsave.configs")))
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def first_line(path: Path) -> str:
    """Return the first line of a run file's header comment, which says what it is for."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def find_config(name: str) -> Path:
    """Return the run file of this path, or the shipped one of this name.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(name)
    if path.exists():
        return path
    shipped = shipped_configs()
    stem = name.removesuffix(path.suffix) if path.suffix in _ENDINGS else name
    if stem in shipped:
        return shipped[stem]
    hint = suggestion(stem, shipped)
    if "/" in name or path.suffix in _ENDINGS:
        raise ConfigError(f"there is no run file {name}{hint}")
    raise ConfigError(
        f"there is no run file {name!r} here, and no shipped one of that name{hint} "
        "`thunder-memsave configs list` lists the shipped ones."
    )


def shown_name(path: Path) -> str:
    """Return a run file's name for messages; a shipped one is named without the package's directory."""
    return path.name if path in shipped_configs().values() else str(path)


def find_shipped(name: str) -> Path:
    """Return the path of a shipped run file.

    Raises:
        ConfigError: there is none with that name.
    """
    shipped = shipped_configs()
    stem = name.removesuffix(".yaml")
    if stem not in shipped:
        raise ConfigError(
            f"there is no shipped configuration {name!r}{suggestion(stem, shipped)} "
            "`thunder-memsave configs list` lists them."
        )
    return shipped[stem]


def copy_shipped(name: str, destination: str = ".") -> Path:
    """Copy a shipped run file to a path or into a directory, and return where it is.

    A copy of another name writes to a directory of that name, so that `runs/mine` is the run of `mine.yaml`.

    Raises:
        ConfigError: there is none with that name, or the destination exists.
    """
    source = find_shipped(name)
    target = Path(destination)
    if target.is_dir():
        target /= source.name
    if target.exists():
        raise ConfigError(f"{target} exists; name another file, or remove it.")
    if not target.parent.is_dir():
        raise ConfigError(f"the directory {target.parent} does not exist; make it first.")
    try:
        text = source.read_text(encoding="utf-8")
        target.write_text(_writing_to(target.stem, source.stem, text), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}.") from error
    return target


def _writing_to(name: str, former: str, text: str) -> str:
    """Return the text of a run file with the last part of its output_dir replaced by the file's name."""
    if name == former:
        return text
    line = re.search(r"(?m)^output_dir: (.*/)?.*$", text)
    assert line is not None, "shipped run files have one"
    value = f"{line[1] or ''}{name}"
    if not re.fullmatch(r"[\w./-]+", value):
        value = json.dumps(value)  # which is YAML too
    return f"{text[: line.start()]}output_dir: {value}{text[line.end() :]}"

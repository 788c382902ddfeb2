"""The run files that come with the package: their names, their texts, and copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from thunder_memsave.finetune.run_file.edited_text import with_overrides, without_key
from thunder_memsave.finetune.run_file.reading.arguments import Argument
from thunder_memsave.finetune.run_file.reading.overrides import parse_overrides
from thunder_memsave.settings.problems import ConfigError, suggestion
from thunder_memsave.settings.yaml_file import load_yaml

_ENDINGS = (".yaml", ".yml")
_MODEL, _ARCHITECTURE = "model.name_or_path", "model.architecture"
_FIRST_KEY = "\nmodel:"


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


def copy_shipped(name: str, destination: str = ".", *, overrides: Sequence[Argument] = ()) -> Path:
    """Copy a shipped run file to a path or into a directory, and return where it is.

    A copy of another name writes to a directory of that name, so that `runs/mine` is the run of `mine.yaml`. A copy
    for another model has no `model.architecture` and no header, which are those of the first.

    Args:
        name: The run file.
        destination: A file that does not exist, or a directory.
        overrides: Keys that differ in the copy.

    Raises:
        ConfigError: there is none with that name, or the destination exists, or a key does not.
    """
    source = find_shipped(name)
    target = Path(destination)
    if target.is_dir():
        target /= source.name
    if target.exists():
        raise ConfigError(f"{target} exists; name another file, or remove it.")
    if not target.parent.is_dir():
        raise ConfigError(f"the directory {target.parent} does not exist; make it first.")
    text = _changed(source, target.stem, overrides)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}.") from error
    return target


def _changed(source: Path, name: str, overrides: Sequence[Argument]) -> str:
    text, given = source.read_text(encoding="utf-8"), {each.key for each in overrides}
    if name != source.stem and "output_dir" not in given:
        former = Path(load_yaml(source)["output_dir"])
        overrides = [*overrides, *parse_overrides([f"--output_dir={former.with_name(name)}"])]
    text = with_overrides(text, overrides)
    if _MODEL not in given:
        return text
    if not any(key.startswith(_ARCHITECTURE) for key in given):
        text = without_key(text, _ARCHITECTURE)
    # What the header says of memory, of the hub and of commands is about the first model.
    return f"# As {source.stem}, with another model.\n{text[text.index(_FIRST_KEY) + 1 :]}"

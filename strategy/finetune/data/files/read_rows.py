"""Reads the rows of a data file of any kind: JSONL, JSON, CSV, Parquet or Arrow."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from thunder_memsave.finetune.data.files.bad_rows import csv_columns, delimiter_of, first_line
from thunder_memsave.finetune.data.files.jsonl import check_file, json_object, lines_of
from thunder_memsave.settings.problems import ConfigError

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_SAVED = ("state.json", "dataset_dict.json")
"""Files of a directory that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write."""


def files_of(path: Path) -> list[Path]:
    """Return the path itself, or the data files of a directory that is not one data set, in the order of their names.

    Raises:
        ConfigError: there are none.
    """
    if not path.is_dir() or _is_saved(path):
        return [path]
    files = sorted(each for each in path.iterdir() if each.suffix.lower() in _SUFFIXES)
    if not files:
        raise ConfigError(
            f"the directory {path} has no data files: none ends in {', '.join(_SUFFIXES)}, and the datasets library "
            "did not save it."
        )
    return files


def kind_of(path: Path) -> str:
    """Recognise `JSONL`, `JSON`, `CSV`, `Parquet` or `Arrow` by a file's contents; a directory is one of `datasets`.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is none of these.
    """
    if path.is_dir():
        return "Arrow"
    start = _start(path)
    if start.startswith(b"PAR1"):
        return "Parquet"
    if path.suffix.lower() == ".arrow" or start.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "Arrow"
    check_file(path)
    return _kind_of_text(path)


def read_rows(path: Path, kind: str) -> Iterator[tuple[int, dict[str, Any] | ConfigError]]:
    """Yield each row with its number, from 1: its line in a file of lines; a row that cannot be read as an error.

    Raises:
        ConfigError: the file as a whole cannot be read, or needs the package `datasets`, which is not there.
    """
    if kind == "JSONL":
        return _jsonl_rows(path)
    if kind == "JSON":
        return _json_rows(path)
    return _csv_rows(path) if kind == "CSV" else _table_rows(path, kind)


def _is_saved(path: Path) -> bool:
    return any((path / name).exists() for name in _SAVED)


def _start(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(8)
    except OSError as error:
        raise ConfigError(f"cannot read the data file {path}: {error.strerror}.") from error


def _kind_of_text(path: Path) -> str:
    line = first_line(path)
    if not line:
        raise ConfigError(f"the data file {path} is empty; name a file with rows.")
    suffix = path.suffix.lower()
    if line.startswith(b"["):
        return "JSON"
    if line.startswith(b"{"):
        return "JSON" if suffix == ".json" and not _is_object(line) else "JSONL"
    columns = csv_columns(line)
    if columns is not None and (len(columns) > 1 or suffix in (".csv", ".tsv")):
        return "CSV"
    if suffix in (".jsonl", ".ndjson", ".json"):
        return "JSONL"
    raise ConfigError(
        f"{path} is of no kind that is known: its first line is not JSON, and does not name columns either. Known are "
        "JSONL, JSON, CSV, Parquet and Arrow; PlainText reads text."
    )


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | ConfigError]]:
    for number, line in enumerate(lines_of(path), start=1):
        if line.strip():
            try:
                yield number, json_object(line)
            except ConfigError as error:
                yield number, error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | ConfigError]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if isinstance(rows, dict):
        lists = [each for each in rows.values() if isinstance(each, list)]
        rows = lists[0] if len(lists) == 1 else rows
    if not isinstance(rows, list):
        raise ConfigError(f"{path} is one JSON {type(rows).__name__}; write a list of objects.")
    for number, row in enumerate(rows, start=1):
        is_row = isinstance(row, dict)
        told = f"this is a {type(row).__name__}, but a row must be a JSON object."
        yield number, row if is_row else ConfigError(told)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | ConfigError]]:
    """Yield the rows with the line at which each begins, for a quoted value may go on over several."""
    delimiter = delimiter_of(first_line(path).decode("utf-8"))
    number = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header: list[str] = []
            for values in reader:
                if values and not header:
                    header = values
                elif values:
                    yield number + 1, _csv_row(header, values)
                number = reader.line_num
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{number + 1}: this is not CSV: {error}.") from error


def _csv_row(header: list[str], values: list[str]) -> dict[str, Any] | ConfigError:
    if len(values) != len(header):
        return ConfigError(
            f"this row has {len(values)} values, but the header {len(header)}; put values with a separator into quotes."
        )
    return dict(zip(header, values, strict=True))


def _table_rows(path: Path, kind: str) -> Iterator[tuple[int, dict[str, Any] | ConfigError]]:
    for number, row in enumerate(_table(path, kind), start=1):
        yield number, _without_nulls(row)


def _table(path: Path, kind: str) -> Any:
    """Open a table with the datasets library, which reads it piece by piece."""
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"{path} is in the {kind} format, which needs the package datasets: pip install datasets."
        ) from error
    try:
        if kind == "Parquet":
            return datasets.load_dataset(
                "parquet", data_files=str(path), split="train", streaming=True
            )
        found = datasets.load_from_disk(str(path)) if path.is_dir() else None
        found = datasets.Dataset.from_file(str(path)) if found is None else found
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot read the {kind} data in {path}: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        splits = ", ".join(str(path / name) for name in found)
        raise ConfigError(f"{path} has several splits; name one of them: {splits}.")
    return found


def _without_nulls(value: Any) -> Any:
    """Leave out the keys that a table adds to an object because another row has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value

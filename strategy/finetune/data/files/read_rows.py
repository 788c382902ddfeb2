"""Reads the rows of a data file of any kind: JSONL, JSON, CSV, Parquet or Arrow."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thunder_memsave.finetune.data.files.bad_rows import csv_columns, delimiter_of, first_line
from thunder_memsave.finetune.data.files.jsonl import (
    check_file,
    json_object,
    lines_of,
    no_object,
    not_utf8,
    refuse_special,
)
from thunder_memsave.finetune.data.files.tables import batches_of, table_rows
from thunder_memsave.settings.problems import ConfigError

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_TABLES = (".csv", ".tsv")
_MOST_CHARACTERS = 2**31 - 1
"""A value of a CSV file has at most so many characters; Python allows 131,072 unless told."""
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
    refuse_special(path)
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
    return _csv_rows(path) if kind == "CSV" else table_rows(path, kind)


def count_rows(path: Path, kind: str) -> int:
    """Count the rows of a file, without keeping any."""
    if kind == "JSONL":
        return sum(1 for line in lines_of(path) if line.strip())
    if kind in ("Parquet", "Arrow"):
        return sum(batch.num_rows for batch in batches_of(path, kind))
    return sum(1 for _ in read_rows(path, kind))


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
    columns = csv_columns(line, allows_unnamed=suffix in _TABLES)
    if columns is not None and (len(columns) > 1 or suffix in _TABLES):
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
        yield number, row if isinstance(row, dict) else no_object(row)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | ConfigError]]:
    """Yield the rows with the line at which each begins, for a quoted value may go on over several."""
    delimiter = delimiter_of(first_line(path).decode("utf-8"))
    number = 0
    csv.field_size_limit(_MOST_CHARACTERS)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header: list[str] = []
            for values in reader:
                if values and not header:
                    header = _checked_header(path, values)
                elif values:
                    yield number + 1, _csv_row(header, values)
                number = reader.line_num
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}:{number + 1}: {not_utf8(error)}") from error
        except csv.Error as error:
            raise ConfigError(f"{path}:{number + 1}: this is not CSV: {error}.") from error


def _checked_header(path: Path, header: list[str]) -> list[str]:
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path} names the column {twice!r} twice; remove or rename one.")
    return header


def _csv_row(header: list[str], values: list[str]) -> dict[str, Any] | ConfigError:
    if len(values) != len(header):
        return ConfigError(
            f"this row has {len(values)} values, but the header {len(header)}; put values with a separator into quotes."
        )
    # A column without a name is pandas' number of the row.
    return {name: value for name, value in zip(header, values, strict=True) if name}

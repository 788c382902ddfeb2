"""Says once what is wrong with a data file, and which key to change, instead of once per row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thunder_memsave.finetune.data.files.row_formats import FORMATS, FormatName, recognised
from thunder_memsave.settings.problems import ConfigError, ConfigErrors

CLASS_PATH = "data.dataset.class_path"
_FORMAT = "data.dataset.init_args.format"
_MAX_REPORTED = 20
_MOST_NUMBERS = 5
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_READS_ALL = "DataFiles"
_DELIMITERS = ",;\t"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    number: int
    """Line of the file, or number of the row, from 1."""
    message: str


def bad_rows(
    path: Path, found: Sequence[BadRow], *, num_good: int, reads: FormatName | None, reader: str
) -> ConfigError:
    """Make one error of the bad rows of a file.

    Args:
        path: The file.
        found: The bad rows, at least one.
        num_good: Number of rows that can be used; if there are some, the file has the right format.
        reads: The format that the rows should have; None: any.
        reader: Name of the class that reads it.
    """
    whole = _other_kind(path, reads=reads, reader=reader, num_good=num_good)
    return row_errors(path, found) if whole is None else whole


def row_errors(path: Path, found: Sequence[BadRow]) -> ConfigErrors:
    """Report each reason once, at its first row, with the others that it is about."""
    alike: dict[str, list[int]] = {}
    for row in found:
        alike.setdefault(row.message, []).append(row.number)
    problems = [_of_rows(path, numbers, text) for text, numbers in alike.items()]
    num_hidden = sum(len(numbers) for numbers in list(alike.values())[_MAX_REPORTED:])
    problems = problems[:_MAX_REPORTED]
    if num_hidden:
        message = f"{path}: {num_hidden} more rows cannot be used."
        problems.append(ConfigError(message, place=str(path)))
    return ConfigErrors(problems)


def _of_rows(path: Path, numbers: Sequence[int], message: str) -> ConfigError:
    """Report a message at its first row, and count the others that it is about."""
    first, *others = numbers
    place = f"{path}:{first}"
    if others:
        shown = ", ".join(map(str, others[:_MOST_NUMBERS]))
        more = ", ..." if len(others) > _MOST_NUMBERS else ""
        noun = "row" if len(others) == 1 else "rows"
        message = f"{message.rstrip('.')}. The same in {len(others)} more {noun}: {shown}{more}."
    return ConfigError(f"{place}: {message}", place=place)


def _other_kind(
    path: Path, *, reads: FormatName | None, reader: str, num_good: int
) -> ConfigError | None:
    """Recognise a file of another kind, or of rows of another format."""
    if reader != _READS_ALL:
        start = first_line(path)
        told = _json_message(path, start)
        if told is None and num_good == 0:
            told = _csv_message(path, start)
        if told is not None:
            advice = f"set {CLASS_PATH} to {_READS_ALL}, which reads it"
            return ConfigError(f"{told}; {advice}.", key=CLASS_PATH)
    return None if num_good or reads is None else _format_error(path, reads=reads, reader=reader)


def _json_message(path: Path, start: bytes) -> str | None:
    if not start.startswith((b"[", b"{")) or (start.startswith(b"{") and _is_json(start)):
        return None
    text = path.read_bytes().removeprefix(_BYTE_ORDER_MARK).strip()
    return f"{path} is one JSON value, not one per line" if _is_json(text) else None


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _csv_message(path: Path, start: bytes) -> str | None:
    columns = csv_columns(start)
    if columns is None or (path.suffix.lower() not in (".csv", ".tsv") and not _is_known(columns)):
        return None
    return f"{path} is a CSV file with the columns {', '.join(columns)}"


def csv_columns(start: bytes, *, allows_unnamed: bool = False) -> list[str] | None:
    """Return the columns that the first line of a CSV file names; None: it is no such line.

    Args:
        start: The line.
        allows_unnamed: Whether some columns may have no name.
    """
    try:
        text = start.decode("utf-8").strip()
    except UnicodeDecodeError:
        return None
    if not text or text[0] in "{[":
        return None
    try:
        columns = next(csv.reader([text], delimiter=delimiter_of(text)))
    except csv.Error:  # a carriage return within, or a value of more than 131,072 characters
        return None
    are_named = any if allows_unnamed else all
    return columns if are_named(column.strip() for column in columns) else None


def delimiter_of(line: str) -> str:
    """Return the character that separates the columns of a header: the one that it has most of."""
    return max(_DELIMITERS, key=line.count)


def _is_known(columns: Sequence[str]) -> bool:
    return recognised(dict.fromkeys(columns, "")) is not None


def _format_error(path: Path, *, reads: FormatName, reader: str) -> ConfigError | None:
    row = next(_objects(path), None)
    found = None if row is None else recognised(row)
    if row is None or found is None or FORMATS[reads].is_one(row):
        return None
    key, advice = CLASS_PATH, f"set {CLASS_PATH} to {found.reader}, which reads them"
    if reader == _READS_ALL:
        key, advice = _FORMAT, f"set {_FORMAT} to {found.name}, or leave it out"
    return ConfigError(
        f"the rows of {path} are {found.shown}, but {reader} was to read {FORMATS[reads].shown}; {advice}.",
        key=key,
    )


def _objects(path: Path) -> Iterator[dict[str, object]]:
    """Yield the first lines that are JSON objects."""
    with path.open("rb") as file:
        for line in (line for line, _ in zip(file, range(_MAX_REPORTED), strict=False)):
            try:
                row = json.loads(line.removeprefix(_BYTE_ORDER_MARK))
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def first_line(path: Path) -> bytes:
    """Return the first line of a file that is not blank, stripped; empty: there is none."""
    with path.open("rb") as file:
        lines = (line.removeprefix(_BYTE_ORDER_MARK).strip() for line in file)
        return next((line for line in lines if line), b"")

"""Reads JSONL files, checking every row and reporting the bad ones by line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from thunder_memsave.finetune.data.counting import Counting
from thunder_memsave.finetune.data.documents import Document, Part
from thunder_memsave.finetune.data.files.bad_rows import CLASS_PATH, BadRow, bad_rows
from thunder_memsave.finetune.data.files.row_formats import FormatName
from thunder_memsave.settings.problems import ConfigError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
_PARQUET = b"PAR1"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def read_jsonl(
    path: Path,
    parts: Callable[[Mapping[str, Any]], tuple[Part, ...]],
    *,
    rendered: bool,
    reads: FormatName,
    reader: str,
) -> list[Document]:
    """Make a document of each non-empty line.

    Lines end with a line feed, optionally after a carriage return; a byte order mark at the
    start is skipped.

    Args:
        path: The file.
        parts: Checks a row and cuts it into parts; raises `ConfigError` for a bad one.
        rendered: Value of `Document.rendered`.
        reads: The format that the rows should have.
        reader: Name of the class that reads them, for messages.

    Raises:
        ConfigError: the file cannot be used; or rows cannot (each reason once, with its lines),
            or the file has none.
    """
    check_file(path)
    documents, problems = [], []
    counting = Counting(f"reading bytes of {path}", total=path.stat().st_size)
    for number, line in enumerate(lines_of(path), start=1):
        counting.add(len(line))
        if not line.strip():
            continue
        try:
            made = parts(json_object(line))
            check_encodable(made)
            origin = f"{path}:{number}"
            documents.append(Document(parts=made, origin=origin, rendered=rendered))
        except ConfigError as error:
            problems.append(BadRow(number=number, message=str(error)))
    if problems:
        raise bad_rows(path, problems, num_good=len(documents), reads=reads, reader=reader)
    if not documents:
        raise ConfigError(f"the data file {path} is empty; write one JSON object per line.")
    return documents


def string_of(row: Mapping[str, Any], key: str) -> str:
    """Return a row's non-empty text under a key."""
    if key not in row:
        there = ", ".join(map(repr, row)) or "no keys"
        raise ConfigError(f"there is no {key!r}; there is {there}.")
    if not isinstance(row[key], str) or not row[key]:
        raise ConfigError(f"{key!r} is {_short(row[key])}, but must be a text that is not empty.")
    return str(row[key])


def read_text(path: Path) -> str:
    """Return a file's text, which must not be blank."""
    check_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        place = f"{path}:{line}"
        raise ConfigError(f"{place}: {not_utf8(error)}", place=place) from error
    if not text.strip():
        raise ConfigError(f"the data file {path} is empty.")
    return text


def check_file(path: Path) -> None:
    """Refuse a file that is no text: a directory, one that cannot be read, is compressed, or in a binary format."""
    if path.is_dir():
        raise ConfigError(f"the data file {path} is a directory; name a file in it.")
    refuse_special(path)
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise ConfigError(f"cannot read the data file {path}: {error.strerror}.") from error
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise ConfigError(f"the data file {path} is compressed ({name}); unpack it first.")
    if start.startswith(_UTF_16):
        raise ConfigError(f"the data file {path} is in UTF-16; save it as UTF-8.")
    if start.startswith(_PARQUET):
        raise ConfigError(
            f"the data file {path} is in the Parquet format; set data.dataset.class_path to DataFiles, which reads it.",
            key=CLASS_PATH,
        )


def refuse_special(path: Path) -> None:
    """Refuse a pipe or a device, which would wait, and could be read only once."""
    try:
        is_special = path.exists() and not path.is_file()
    except OSError:
        return  # reading it says why
    if is_special:
        raise ConfigError(f"the data file {path} is no file; write the rows into one.")


def lines_of(path: Path) -> Iterator[bytes]:
    """Split at line feeds only: other separators are legal inside a JSON string."""
    with path.open("rb") as file:
        for number, line in enumerate(file):
            yield line.removeprefix(_BYTE_ORDER_MARK) if number == 0 else line


def json_object(line: bytes) -> dict[str, Any]:
    """Read a line; columns of messages count characters from 1, and the line's end is none.

    Raises:
        ConfigError: it is no JSON object.
    """
    try:
        row = json.loads(
            line.rstrip(b"\r\n").decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise ConfigError(not_utf8(error)) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"this is not JSON: {error.msg} at column {error.colno}.") from error
    except RecursionError as error:
        raise ConfigError("this is JSON nested too deeply to be read.") from error
    except ConfigError:  # which is a ValueError
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"this is not JSON that can be read: {error}.") from error
    if not isinstance(row, dict):
        raise no_object(row)
    return row


def no_object(row: object) -> ConfigError:
    """Make the error about a JSON value in place of a row."""
    kinds = {type(None): "null", bool: "true or false", str: "a text", list: "a list"}
    kind = kinds.get(type(row), "a number")
    return ConfigError(f"this is {kind}, but a row must be a JSON object.")


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ConfigError(f"the key {key!r} is given twice; remove one.")
        made[key] = value
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ConfigError(f"this is not JSON: {name} is not a JSON number; write null.")


def check_encodable(parts: Iterable[Part]) -> None:
    """Refuse text that is not Unicode: half of a surrogate pair."""
    for part in parts:
        try:
            part.text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the text has half of a surrogate pair, {part.text[error.start]!a}, which is no "
                "character; write the pair, or the character itself."
            ) from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """Say which byte is not UTF-8."""
    return f"the byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8."


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

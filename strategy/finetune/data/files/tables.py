"""Reads Parquet and Arrow files, and directories of them that `datasets` saved, a batch of rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from thunder_memsave.settings.problems import ConfigError

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_ROWS_PER_BATCH = 256


def table_rows(path: Path, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row with its number, from 1.

    Raises:
        ConfigError: pyarrow is missing, or the file is broken.
    """
    number = 0
    for batch in batches_of(path, kind):
        for row in batch.to_pylist():
            number += 1
            yield number, _without_nulls(row)


def batches_of(path: Path, kind: str) -> Iterator[Any]:
    """Yield the record batches of a table, of which one is held at a time.

    Raises:
        ConfigError: pyarrow is missing, or the file is broken.
    """
    try:
        arrow: Any = import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(
            f"{path} is in the {kind} format, which needs the package pyarrow: pip install pyarrow."
        ) from error
    try:
        if kind == "Parquet":
            yield from _parquet_batches(path)
            return
        for file in _saved_files(path) if path.is_dir() else [path]:
            yield from _arrow_batches(file, arrow)
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(f"cannot read the {kind} data in {path}: {error}") from error


def _parquet_batches(path: Path) -> Iterator[Any]:
    parquet: Any = import_module("pyarrow.parquet")
    with parquet.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
        yield from file.iter_batches(batch_size=_ROWS_PER_BATCH, use_threads=False)


def _arrow_batches(path: Path, arrow: Any) -> Iterator[Any]:
    """Read either of Arrow's two formats; not mapped into memory, where what was read would stay."""
    with arrow.OSFile(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = arrow.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
            return
        file.seek(0)
        yield from arrow.ipc.open_stream(file)


def _saved_files(directory: Path) -> list[Path]:
    """Return the files of a data set that `Dataset.save_to_disk` wrote, in their order."""
    if (directory / _SPLITS).exists():
        names = _json(directory / _SPLITS).get("splits")
        splits = ", ".join(str(directory / str(name)) for name in names or ())
        raise ConfigError(f"{directory} has several splits; name one of them: {splits}.")
    try:
        names = [each["filename"] for each in _json(directory / _STATE)["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory / _STATE} does not say which files have the rows."
        ) from error
    for name in names:
        if Path(str(name)).name != name:
            raise ConfigError(f"{directory / _STATE} names {name!r}, which is no file beside it.")
    return [directory / name for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    return value if isinstance(value, dict) else {}


def _without_nulls(value: Any) -> Any:
    """Leave out the keys that a table adds to an object because another row has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value

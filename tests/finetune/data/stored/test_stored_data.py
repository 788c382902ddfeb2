"""Data that streams: the samples of data in memory, each row once per epoch whatever happens, and no memory per row."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.language_model import prompt_rows, run_values, write_jsonl, write_run_file
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.data.batches import (
    NO_ROW,
    Sharding,
    make_batch,
    num_steps_per_epoch,
    step_rows,
)
from thunder_memsave.finetune.data.packing import Rows
from thunder_memsave.finetune.data.prepare import PreparedData, prepare_data
from thunder_memsave.finetune.data.stored import places, stored_data
from thunder_memsave.finetune.data.stored.numbers_file import NumbersWriter
from thunder_memsave.finetune.data.tokenize import Sample
from thunder_memsave.finetune.disk_cache import cached
from thunder_memsave.finetune.run_file.config import (
    ClassSpec,
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from thunder_memsave.measure.disk_table import cache_directory
from thunder_memsave.settings.problems import ConfigError, ConfigErrors

SampleKey = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("THUNDER_MEMSAVE_CACHE", str(directory))
    return directory


def prepared(
    path: Any, tokenizer: Any, *, length: int = 32, **arguments: Any
) -> PreparedData[Rows]:
    data = {key: arguments.pop(key) for key in ("packing", "train_on") if key in arguments}
    arguments = {"path": path, "streaming": True, **arguments}
    spec: ClassSpec = {"class_path": "DataFiles", "init_args": arguments}
    config = RunConfig(
        model=ModelConfig(name_or_path="any"),
        data=DataConfig(dataset=spec, max_seq_length=length, **data),
        train=TrainConfig(seed=3),
    )
    return prepare_data(config, tokenizer)


def key_of(sample: Sample) -> SampleKey:
    return tuple(sample.input_ids.tolist()), tuple(sample.targets.tolist())


def samples_in(rows: Rows) -> Counter[SampleKey]:
    """Count the samples in all places, which is what an epoch has."""
    return Counter(
        key_of(rows.samples[index]) for row in range(len(rows)) for index in rows.places[row]
    )


def token_rows(num_rows: int, *, num_more: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows that can be told apart by their first two tokens."""
    for row in range(num_rows):
        yield {"input_ids": [row % 300, row // 300, *range(3, 3 + num_more + row % 13)]}


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "data").iterdir() if path.is_dir())


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("keys", [("text",), ("prompt", "completion")])
@pytest.mark.parametrize("length", [8, 64])
def test_streamed_samples_are_those_of_data_in_memory(
    keys: tuple[str, ...], length: int, packing: bool, tmp_path: Path, tokenizer: Any
) -> None:
    made = [{**row, "text": row["prompt"] + row["completion"]} for row in prompt_rows(40)]
    path = str(write_jsonl(tmp_path / "a.jsonl", [{key: row[key] for key in keys} for row in made]))
    options = {"length": length, "packing": packing}
    held = prepared(path, tokenizer, streaming=False, **options)
    streamed = prepared(path, tokenizer, **options)
    assert samples_in(streamed.train) == samples_in(held.train)
    assert len(streamed.train) == len(held.train)
    assert streamed.train.num_documents == held.train.num_documents
    assert streamed.summary.startswith(held.summary)
    batch = streamed.train.lay_out([0, None])
    assert batch.input_ids.shape == (2, length)
    assert key_of(streamed.example) == key_of(streamed.train.samples[0])


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow"])
def test_tables_are_streamed_too(suffix: str, tmp_path: Path, tokenizer: Any) -> None:
    made = [row["prompt"] + row["completion"] for row in prompt_rows(600)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        path.write_text("".join(f'"{text}"\n' for text in ("text", *made)))
    else:
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table({"text": made})
        if suffix == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            with arrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=100)
    held = prepared(str(path), tokenizer, streaming=False)
    streamed = prepared(str(path), tokenizer, val_fraction=0.1)
    assert streamed.validation is not None
    parts = samples_in(streamed.train) + samples_in(streamed.validation)
    assert parts == samples_in(held.train)
    assert samples_in(streamed.validation).total() == 60


def test_a_fraction_is_held_out_and_weights_repeat_the_rest(tmp_path: Path, tokenizer: Any) -> None:
    many = write_jsonl(tmp_path / "a.jsonl", token_rows(100))
    few = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [7, 8, n]} for n in range(10)])
    path = [{"path": str(many), "weight": 0.5}, {"path": str(few), "weight": 2}]
    data = prepared(path, tokenizer, val_fraction=0.1, train_on="all")
    assert data.validation is not None
    train, validation = samples_in(data.train), samples_in(data.validation)
    assert not train.keys() & validation.keys()
    assert validation.total() == len(validation) == 11
    of_few = {key: count for key, count in train.items() if key[0][:2] == (7, 8)}
    assert len(of_few) == 9
    assert set(of_few.values()) == {2}
    of_many = {key: count for key, count in train.items() if key not in of_few}
    assert len(of_many) == 45
    assert set(of_many.values()) == {1}
    assert data.train.num_documents == data.validation.num_documents


def test_a_file_for_validation_is_read_whole(tmp_path: Path, tokenizer: Any) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", token_rows(30))
    other = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [7, 8, n]} for n in range(10)])
    data = prepared(str(train), tokenizer, val_path=str(other))
    assert data.validation is not None
    assert samples_in(data.validation).total() == 10
    assert samples_in(data.train).total() == 30


def rows_of_step(rows: Rows, world_size: int, step: int) -> list[int]:
    """Return what all ranks together see in a step, as the numbers that `token_rows` wrote."""
    seen = []
    for rank in range(world_size):
        sharding = Sharding(
            global_batch_size=6, micro_batch_size=1, rank=rank, world_size=world_size
        )
        for chosen in step_rows(len(rows), sharding, seed=3, step=step, order="computed"):
            batch = make_batch(rows, chosen)
            for number, row in enumerate(chosen):
                ends = sorted({0, *batch.document_ends[number].tolist()})
                starts = ends[:-1] if row != NO_ROW else []
                ids = batch.input_ids[number]
                seen += [int(ids[start]) + 300 * int(ids[start + 1]) for start in starts]
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_seen_once_per_epoch_through_kills_and_other_numbers_of_ranks(
    seed: int, tmp_path: Path, tokenizer: Any
) -> None:
    chance, num_rows = random.Random(seed), 500
    path = str(write_jsonl(tmp_path / "a.jsonl", token_rows(num_rows)))
    data = prepared(path, tokenizer, packing=seed % 2 == 0)
    sharding = Sharding(global_batch_size=6, micro_batch_size=1)
    per_epoch = num_steps_per_epoch(len(data.train), sharding)
    history: list[list[int]] = []  # what the weights of each step have seen
    world_size = 2
    while len(history) < 2 * per_epoch:
        data = prepared(path, tokenizer, packing=seed % 2 == 0)  # each process reads anew
        until = len(history) + chance.randrange(1, per_epoch)
        for step in range(len(history), min(until, 2 * per_epoch)):
            history.append(rows_of_step(data.train, world_size, step))
        if len(history) < 2 * per_epoch:  # killed: what was not saved is lost
            del history[len(history) - chance.randrange(4) :]
        world_size = chance.choice([1, 2, 3])
    for epoch in range(2):
        seen = Counter(row for step in history[epoch * per_epoch :][:per_epoch] for row in step)
        assert seen == Counter(range(num_rows))
    assert history[:per_epoch] != history[per_epoch:]


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_BLOCK", 500)  # held in any case, and filled by both

    def peak_bytes(num_rows: int) -> int:
        # Python keeps thousands of short tuples for later, but none of 20 items.
        rows = token_rows(num_rows, num_more=20)
        path = str(write_jsonl(tmp_path / f"{num_rows}.jsonl", rows))
        tracemalloc.start()
        data = prepared(path, tokenizer, length=64, val_fraction=0.1)
        for step in range(20):
            rows_of_step(data.train, 1, step)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(100)  # what is imported and cached once
    gc.disable()  # it would free garbage at one moment or another; none grows with the rows
    try:
        small, large = peak_bytes(2_000), peak_bytes(12_000)
    finally:
        gc.enable()
    # 10,000 rows more; a list of their numbers alone would be 80,000 bytes.
    assert large - small < 40_000


def test_tokens_are_made_once_for_equal_data(
    cache: Path, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", token_rows(20))
    first = prepared(str(path), tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(stored_data, "tokenized", None)
        again = prepared(str(path), tokenizer)
    assert again.train.fingerprint == first.train.fingerprint
    assert first.train.fingerprint.startswith("streamed-")
    write_jsonl(path, token_rows(21))
    changed = prepared(str(path), tokenizer)
    assert changed.train.fingerprint != first.train.fingerprint
    assert prepared(str(path), tokenizer, length=16).train.length == 16
    assert len(entries(cache)) == 3


def test_a_file_that_lacks_its_end_is_made_again(
    cache: Path, tmp_path: Path, tokenizer: Any
) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", token_rows(20)))
    expected = samples_in(prepared(path, tokenizer).train)
    (entry,) = entries(cache)
    tokens = cache / "data" / entry / "train" / "tokens.bin"
    os.truncate(tokens, tokens.stat().st_size // 2)
    (cache / "data" / f"{entry}.partial-killed-1").mkdir()
    assert samples_in(prepared(path, tokenizer).train) == expected
    assert entries(cache) == [entry]


def test_a_full_disk_is_one_message_and_leaves_nothing(
    cache: Path, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: NumbersWriter, numbers: Any) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(NumbersWriter, "append", full)
    path = str(write_jsonl(tmp_path / "a.jsonl", token_rows(20)))
    with pytest.raises(ConfigError, match=r"No space left on device.*THUNDER_MEMSAVE_CACHE"):
        prepared(path, tokenizer)
    assert entries(cache) == []


def test_bad_rows_are_told_as_of_data_in_memory_and_leave_nothing(
    cache: Path, tmp_path: Path, tokenizer: Any
) -> None:
    rows: list[dict[str, Any]] = [*token_rows(5), {"input_ids": []}, {"input_ids": [1, -4]}]
    path = str(write_jsonl(tmp_path / "a.jsonl", rows))
    told = []
    for streaming in (True, False):
        with pytest.raises(ConfigErrors) as refused:
            prepared(path, tokenizer, streaming=streaming)
        told.append([(str(each), each.key) for each in refused.value.problems])
    assert told[0] == told[1]
    assert f"{path}:6" in told[0][0][0]
    assert entries(cache) == []


def test_a_file_of_bad_rows_is_not_read_to_its_end(tmp_path: Path, tokenizer: Any) -> None:
    empty: list[dict[str, Any]] = [{"input_ids": []}] * 1500
    rows = [{"input_ids": [1]}, *empty]
    path = str(write_jsonl(tmp_path / "a.jsonl", rows))
    with pytest.raises(ConfigErrors, match="1,000 rows cannot be used, and the file was not read"):
        prepared(path, tokenizer)


def test_a_json_value_is_not_streamed(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"input_ids": [1, 2]}]')
    with pytest.raises(ConfigError, match="can only be read as a whole") as refused:
        prepared(str(path), tokenizer)
    assert refused.value.key == "data.dataset.init_args.streaming"


def test_a_file_that_changes_while_it_is_read_is_refused(
    cache: Path, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", token_rows(20))

    def slow(*arguments: Any, **options: Any) -> Any:
        write_jsonl(path, token_rows(21))
        return places.write_places(*arguments, **options)

    monkeypatch.setattr(stored_data, "write_places", slow)
    with pytest.raises(ConfigError, match="changed while they were read"):
        prepared(str(path), tokenizer)
    assert entries(cache) == []


def test_rows_stay_readable_when_the_cache_is_emptied(
    cache: Path, tmp_path: Path, tokenizer: Any
) -> None:
    data = prepared(str(write_jsonl(tmp_path / "a.jsonl", token_rows(20))), tokenizer)
    expected = samples_in(data.train)
    assert cache_directory() == cache
    for path in (cache / "data").rglob("*.bin"):
        path.unlink()
    assert samples_in(data.train) == expected
    assert np.array_equal(data.train.lay_out([0]).input_ids, data.train.lay_out([0]).input_ids)


def test_a_process_waits_for_another_that_makes_the_same_tokens(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, made = threading.Event(), []

    def make(directory: Path) -> None:
        made.append(directory)
        begun.set()
        time.sleep(0.3)
        (directory / "whole").touch()

    def ask() -> Path:
        return cached(
            cache / "data",
            "key",
            make,
            is_whole=lambda entry: (entry / "whole").exists(),
            waits_for="another process, which tokenizes the data",
        )

    first = threading.Thread(target=ask)
    first.start()
    assert begun.wait(10)
    assert ask() == cache / "data" / "key"
    first.join()
    assert len(made) == 1
    told = "waiting for another process, which tokenizes the data"
    assert capsys.readouterr().err.splitlines() == [told]


def test_validate_says_where_the_tokens_of_a_run_file_are(
    cache: Path, tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", prompt_rows(40))
    arguments = {"path": str(path), "streaming": True, "val_fraction": 0.25}
    dataset = {"class_path": "DataFiles", "init_args": arguments}
    values = run_values(tmp_path, model_directory)
    values["data"]["dataset"] = dataset
    assert main(["validate", str(write_run_file(tmp_path, values))]) == 0
    told = capsys.readouterr().out
    assert f"tokens are in {cache}/data/" in told
    assert "train: 30 documents" in told
    assert "validation: 10 documents" in told
    assert main(["validate", str(write_run_file(tmp_path, values))]) == 0
    assert capsys.readouterr().out == told

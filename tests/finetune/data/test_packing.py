from __future__ import annotations

import dataclasses
import random

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

from harness.language_model import document_ids, llama_config, loss_sum, sample_of
from thunder_memsave.finetune.data.batches import make_batch
from thunder_memsave.finetune.data.packing import Batch, Rows, pack, pad
from thunder_memsave.finetune.data.tokenize import IGNORED, Sample


def samples_of(lengths: list[int], *, seed: int = 0) -> list[Sample]:
    generator = random.Random(seed)
    samples = []
    for length in lengths:
        ids = [generator.randrange(4, 300) for _ in range(length)]
        samples.append(sample_of(ids))
    return samples


def documents_of(rows: Rows) -> list[list[int]]:
    """Read the documents back from the rows."""
    batch = rows.lay_out(range(len(rows)))
    return [
        batch.input_ids[row][document_ids(batch)[row] == number].tolist()
        for row in range(len(rows))
        for number in range(1, int(document_ids(batch)[row].max()) + 1)
    ]


def test_rows_have_the_same_fingerprint_only_when_they_train_alike() -> None:
    samples = samples_of([3, 5, 4])
    rows = pad(samples, length=8, pad_id=0)
    assert rows.fingerprint == pad(samples_of([3, 5, 4]), length=8, pad_id=0).fingerprint
    targets = dataclasses.replace(samples[2], targets=samples[2].targets * 0)
    others = [
        pad(samples, length=9, pad_id=0),
        pad(samples[::-1], length=8, pad_id=0),
        pad([*samples[:2], targets], length=8, pad_id=0),
        pack(samples, length=8, pad_id=0, seed=0),
    ]
    assert len({rows.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_packed_rows_hold_every_document_once() -> None:
    samples = samples_of([random.Random(1).randrange(2, 33) for _ in range(100)])
    rows = pack(samples, length=32, pad_id=0, seed=3)
    assert sorted(documents_of(rows)) == sorted(sample.input_ids.tolist() for sample in samples)
    assert rows.lay_out([0]).input_ids.shape == torch.Size([1, 32])


def test_documents_that_fit_together_exactly_leave_no_padding() -> None:
    rows = pack(samples_of([20, 12, 16, 16, 30, 2]), length=32, pad_id=0, seed=0)
    assert len(rows) == 3
    assert bool((document_ids(rows.lay_out(range(3))) > 0).all())


def test_positions_count_from_zero_in_each_document() -> None:
    rows = pack(samples_of([3, 2]), length=8, pad_id=0, seed=0)
    batch = rows.lay_out([0])
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert document_ids(batch).tolist() == [[1, 1, 1, 2, 2, 0, 0, 0]]


def test_padded_rows_hold_one_document_each() -> None:
    samples = samples_of([3, 5])
    rows = pad(samples, length=8, pad_id=7)
    assert documents_of(rows) == [sample.input_ids.tolist() for sample in samples]
    batch = rows.lay_out([0])
    assert batch.input_ids[0, 3:].tolist() == [7] * 5
    assert batch.targets[0, 2:].tolist() == [IGNORED] * 6


def test_all_rows_have_room_for_as_many_documents() -> None:
    rows = pack(samples_of([6, 2, 2, 2, 2]), length=8, pad_id=0, seed=0)
    assert rows.num_documents == 3
    ends = sorted(rows.lay_out([0, 1]).document_ends.tolist())
    assert ends == [[2, 4, 6], [6, 8, 8]]
    assert rows.lay_out([None]).document_ends.tolist() == [[0, 0, 0]]
    assert rows.lay_out([0]).document_ends.dtype is torch.int32


def test_a_row_takes_no_more_documents_than_it_may() -> None:
    samples = samples_of([2] * 9)
    rows = pack(samples, length=8, pad_id=0, seed=0, max_documents=2)
    assert sorted(len(places) for places in rows.places) == [1, 2, 2, 2, 2]
    assert sorted(documents_of(rows)) == sorted(sample.input_ids.tolist() for sample in samples)
    more = pack(samples, length=8, pad_id=0, seed=0, max_documents=7)
    assert more.lay_out([0]).document_ends.shape == (1, 7)


@torch.no_grad()
def test_packed_documents_have_the_losses_that_they_have_alone() -> None:
    samples = samples_of([5, 9, 3, 12, 2, 1 + 7])
    packed = pack(samples, length=24, pad_id=0, seed=0)
    alone = pad(samples, length=24, pad_id=0)
    for attention in ("sdpa", "eager"):
        set_seed(0)
        config = LlamaConfig(**llama_config())
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        expected = [
            float(loss_sum(model, make_batch(alone, [row]), mask="none"))
            for row in range(len(alone))
        ]
        measured = [
            float(loss_sum(model, one_document(packed, row, number), mask="additive"))
            for row in range(len(packed))
            for number in range(1, len(packed.places[row]) + 1)
        ]
        # float32 sums in another order
        torch.testing.assert_close(sorted(measured), sorted(expected), rtol=1e-5, atol=1e-5)


def one_document(rows: Rows, row: int, number: int) -> Batch:
    """A row whose targets are those of one document only."""
    batch = rows.lay_out([row])
    only = batch.targets.masked_fill(document_ids(batch) != number, IGNORED)
    return dataclasses.replace(batch, targets=only)

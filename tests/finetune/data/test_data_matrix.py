"""Formats x {truncate, pad, pack} x ranks x epochs: how often each sample is seen, and its loss."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.language_model import document_ids, loss_sum, prompt_rows, write_jsonl
from thunder_memsave.finetune.data.batches import (
    Sharding,
    make_batch,
    num_steps_per_epoch,
    ordered_rows,
    step_rows,
)
from thunder_memsave.finetune.data.packing import Batch, Rows
from thunder_memsave.finetune.data.prepare import PreparedData, prepare_data
from thunder_memsave.finetune.data.tokenize import IGNORED, Sample
from thunder_memsave.finetune.model.build import load_tokenizer
from thunder_memsave.finetune.model.documents_apart import MaskKind, take_boundaries
from thunder_memsave.finetune.objectives.causal_lm import model_inputs
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning
from thunder_memsave.finetune.run_file.config import (
    ClassSpec,
    DataConfig,
    EvalConfig,
    LRSchedulerConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from thunder_memsave.finetune.training import ahead, loop

NUM_DOCUMENTS = 23
FORMATS = ("TextJSONL", "PromptJSONL", "ChatJSONL")
LAYOUTS = {
    "truncate": DataConfig(max_seq_length=10, packing=False),
    "pad": DataConfig(max_seq_length=32, packing=False),
    "pack": DataConfig(max_seq_length=32, packing=True),
}
MASKS: dict[str, MaskKind] = {"sdpa": "boundaries", "eager": "additive"}
SampleKey = tuple[tuple[int, ...], tuple[int, ...]]


def write_rows(directory: Path, data_format: str) -> Path:
    """Write documents of different lengths, none of which is another's prefix."""
    rows: list[dict[str, Any]] = []
    for row in prompt_rows(NUM_DOCUMENTS):
        prompt, completion = f"{row['prompt']}: ", row["completion"] + " sort join"
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        texts = {"text": prompt + completion, "prompt": prompt, "completion": completion}
        rows.append({**texts, "messages": turns})
    return write_jsonl(directory / f"{data_format}.jsonl", rows)


def prepared(
    model_directory: Path, directory: Path, data_format: str, layout: str
) -> PreparedData[Rows]:
    return read(model_directory, write_rows(directory, data_format), layout)


def read(model_directory: Path, path: Path, layout: str) -> PreparedData[Rows]:
    """Read rows that may have been written before, by another process; the file's name tells the format."""
    data = LAYOUTS[layout]
    config = RunConfig(
        model=ModelConfig(name_or_path=str(model_directory)),
        data=DataConfig(
            dataset={"class_path": path.stem, "init_args": {"path": str(path)}},
            max_seq_length=data.max_seq_length,
            packing=data.packing,
        ),
    )
    return prepare_data(config, load_tokenizer(config.model))


def key_of_sample(sample: Sample) -> SampleKey:
    return tuple(sample.input_ids.tolist()), tuple(sample.targets.tolist())


def samples_in(batch: Batch) -> Iterator[SampleKey]:
    """Read the samples back from the model's inputs."""
    for row in range(len(batch.input_ids)):
        for number in range(1, int(document_ids(batch)[row].max()) + 1):
            mine = document_ids(batch)[row] == number
            ids, targets = batch.input_ids[row][mine], batch.targets[row][mine]
            yield tuple(ids.tolist()), tuple(targets.tolist())


def expected_samples(rows: Rows) -> Counter[SampleKey]:
    return Counter(key_of_sample(sample) for sample in rows.samples)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("data_format", FORMATS)
def test_every_sample_is_seen_exactly_once_per_epoch(
    model_directory: Path, tmp_path: Path, data_format: str, layout: str, world_size: int
) -> None:
    data = prepared(model_directory, tmp_path, data_format, layout)
    rows = data.train
    expected = expected_samples(rows)
    if data_format == "TextJSONL":  # long documents continue in another sample
        assert (len(expected) > NUM_DOCUMENTS) == (layout == "truncate")
    else:
        assert len(expected) == NUM_DOCUMENTS  # all differ, so counting tells them apart
        assert ("longer than data.max_seq_length" in data.summary) == (layout == "truncate")
    sharding = Sharding(global_batch_size=4, micro_batch_size=2, world_size=world_size)
    num_steps = num_steps_per_epoch(len(rows), sharding)
    orders = []
    for epoch in range(2):
        seen: list[SampleKey] = []
        for step in range(epoch * num_steps, (epoch + 1) * num_steps):
            for rank in range(world_size):
                share = Sharding(
                    global_batch_size=4, micro_batch_size=2, rank=rank, world_size=world_size
                )
                for chosen in step_rows(len(rows), share, seed=7, step=step):
                    seen += samples_in(make_batch(rows, chosen))
        assert Counter(seen) == expected
        orders.append(seen)
    assert orders[0] != orders[1]


def test_evaluation_sees_every_sample_exactly_once(model_directory: Path, tmp_path: Path) -> None:
    rows = prepared(model_directory, tmp_path, "PromptJSONL", "pack").train
    seen: Counter[SampleKey] = Counter()
    for rank in range(2):
        sharding = Sharding(global_batch_size=4, micro_batch_size=2, rank=rank, world_size=2)
        for chosen in ordered_rows(len(rows), sharding):
            seen.update(samples_in(make_batch(rows, chosen)))
    assert seen == expected_samples(rows)


def test_runs_that_differ_in_seed_only_pack_the_same_validation_rows(
    model_directory: Path, tmp_path: Path
) -> None:
    path = str(write_rows(tmp_path, "PromptJSONL"))
    dataset = {"class_path": "PromptJSONL", "init_args": {"path": path, "val_fraction": 0.5}}

    def places(seed: int) -> tuple[Any, Any]:
        config = RunConfig(
            model=ModelConfig(name_or_path=str(model_directory)),
            data=DataConfig(dataset=cast(ClassSpec, dataset), max_seq_length=32),
            train=TrainConfig(seed=seed),
        )
        data = prepare_data(config, load_tokenizer(config.model))
        assert data.validation is not None
        return data.train.places, data.validation.places

    (train, validation), (other_train, other_validation) = places(1), places(2)
    assert validation == other_validation
    assert train != other_train


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("data_format", FORMATS)
@torch.no_grad()
def test_the_mean_per_token_is_that_of_plain_transformers_document_by_document(
    model_directory: Path, tmp_path: Path, data_format: str, layout: str, attention: str
) -> None:
    rows = prepared(model_directory, tmp_path, data_format, layout).train
    # In float64, where 1e-6 tests the formula; float32 sums in another order differ by as much.
    model = AutoModelForCausalLM.from_pretrained(
        model_directory, dtype=torch.float64, attn_implementation=attention
    )
    take_boundaries(model)
    mask = MASKS[attention] if layout == "pack" else "none"
    batch = make_batch(rows, [*range(min(len(rows), 6)), -1])
    measured = loss_sum(model, batch, mask=mask) / (batch.targets != IGNORED).sum()
    assert float(measured) == pytest.approx(reference_mean(model, [batch]), rel=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_have_their_own_losses_through_the_strategy(
    model_directory: Path, tmp_path: Path, attention: str
) -> None:
    rows = prepared(model_directory, tmp_path, "ChatJSONL", "pack").train
    model = AutoModelForCausalLM.from_pretrained(model_directory, attn_implementation=attention)
    take_boundaries(model)
    module = make_fabric().setup(model)
    batch = make_batch(rows, range(len(rows)))
    mask: MaskKind = "boundaries" if attention == "sdpa" else "additive"
    logits = module(**model_inputs(batch, mask=mask)).logits.detach()
    losses = cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
    with torch.no_grad():
        for row in range(len(rows)):
            for number, index in enumerate(rows.places[row], start=1):
                sample = rows.samples[index]
                mine = document_ids(batch)[row] == number
                expected = document_loss(model, *key_of_sample(sample)) * sample.num_targets
                assert float(losses[row][mine].sum()) == pytest.approx(expected, rel=1e-5)


def test_two_ranks_train_on_every_sample_once_per_epoch_by_the_mean_of_all_tokens(
    model_directory: Path, tmp_path: Path
) -> None:
    path = write_rows(tmp_path, "PromptJSONL")
    rows = read(model_directory, path, "pack").train
    run_on_fabric_ranks(_train_and_record, 2, model_directory, path)
    records = [pickle.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(2)]
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    num_steps = len(records[0]["losses"]) // 2
    for epoch in range(2):
        seen: Counter[SampleKey] = Counter()
        for step in range(epoch * num_steps, (epoch + 1) * num_steps):
            batches = [batch for record in records for batch in record["batches"][step]]
            for batch in batches:
                seen.update(samples_in(batch))
            expected = reference_mean(model, batches)
            for record in records:
                assert record["losses"][step] == pytest.approx(expected, rel=1e-5)
        assert seen == expected_samples(rows)


@on_fabric_rank
def _train_and_record(model_directory: Path, path: Path) -> None:
    """Run two epochs of the loop, with accumulation and a learning rate of 0."""
    rows = read(model_directory, path, "pack").train
    recorder = Recorder()
    setattr(ahead, "make_batch", recorder.make_batch)  # noqa: B010 - in this process only
    fabric = make_fabric(devices=2)
    fabric._callbacks.append(recorder)
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    module = fabric.setup(model)
    optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.0))
    sharding = Sharding(
        global_batch_size=4, micro_batch_size=1, rank=fabric.global_rank, world_size=2
    )
    num_steps = num_steps_per_epoch(len(rows), sharding)
    assert len(rows) % sharding.global_batch_size  # so that the last batch is filled with padding
    plan = loop.LoopPlan(
        num_steps=2 * num_steps,
        sharding=sharding,
        seed=7,
        objective=SupervisedFineTuning(mask="additive", length=rows.length),
        max_grad_norm=None,
        lr_scheduler=LRSchedulerConfig(),
        eval=EvalConfig(),
    )
    state = {"model": module, "optimizer": optimizer, "step": 0}
    loop.fit(
        fabric,
        module,
        optimizer,
        train_rows=rows,
        validation_rows=None,
        plan=plan,
        state=state,
    )
    steps = [recorder.batches[start : start + 2] for start in range(0, 4 * num_steps, 2)]
    record = {"batches": steps, "losses": recorder.losses}
    (path.parent / f"rank{fabric.global_rank}").write_bytes(pickle.dumps(record))


class Recorder:
    """Records the rows of each batch, and the loss that the loop reports for each step."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.losses: list[float] = []

    def make_batch(self, rows: Rows, chosen: Sequence[int]) -> Batch:
        batch = make_batch(rows, chosen)
        self.batches.append(batch)
        return batch

    def on_train_batch_end(self, metrics: dict[str, float]) -> None:
        self.losses.append(metrics["loss"])


@torch.no_grad()
def reference_mean(model: Any, batches: Sequence[Batch]) -> float:
    """Return the mean over all target tokens, each document by itself in plain transformers."""
    total, count = 0.0, 0
    for batch in batches:
        for ids, targets in samples_in(batch):
            num_targets = sum(target != IGNORED for target in targets)
            if num_targets:
                total += document_loss(model, ids, targets) * num_targets
            count += num_targets
    return total / count


def document_loss(model: Any, ids: Sequence[int], targets: Sequence[int]) -> float:
    """Return the mean loss of one document; transformers shifts the labels itself, ours are shifted."""
    # A document's last target may be a token beyond its row.
    tokens = [*ids, targets[-1] if targets[-1] != IGNORED else 0]
    labels = [IGNORED, *targets]
    return float(model(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss)

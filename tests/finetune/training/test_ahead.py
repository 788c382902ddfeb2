"""Rows are laid out ahead of their step, each once, and pinned where a GPU reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.language_model import sample_of
from thunder_memsave.finetune.data.batches import Sharding
from thunder_memsave.finetune.data.packing import Batch, Rows, pad
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning
from thunder_memsave.finetune.training.ahead import DataAhead, pinned

NO_FLAGS = (False, False)


def data_ahead(monkeypatch: pytest.MonkeyPatch) -> tuple[DataAhead, list[int]]:
    rows = pad([sample_of([n, n + 1, n + 2]) for n in range(8)], length=3, pad_id=0)
    laid_out: list[int] = []

    def lay_out(rows: Rows, chosen: Any, lay_out: Any = Rows.lay_out) -> Batch:
        laid_out.extend(chosen)
        batch: Batch = lay_out(rows, chosen)
        return batch

    monkeypatch.setattr(Rows, "lay_out", lay_out)
    fabric = Fabric(accelerator="cpu", devices=1)
    sharding = Sharding(global_batch_size=4, micro_batch_size=2)
    objective = SupervisedFineTuning(mask="none", length=3)
    ahead = DataAhead(fabric=fabric, rows=rows, sharding=sharding, seed=0, objective=objective)
    return ahead, laid_out


def test_what_was_laid_out_ahead_is_not_laid_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, laid_out = data_ahead(monkeypatch)
    first = ahead.take(0, NO_FLAGS)
    ahead.lay_out(1)
    assert len(laid_out) == 8
    second = ahead.take(1, NO_FLAGS)
    assert sorted(laid_out) == list(range(8))  # an epoch
    assert (first.position, second.position) == (0, 1)
    assert int(second.weight) == sum(int((b.targets >= 0).sum()) for b in second.batches)


def test_another_position_than_the_one_ahead_has_its_own_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a rollback."""
    ahead, laid_out = data_ahead(monkeypatch)
    ahead.lay_out(1)
    found = ahead.take(0, NO_FLAGS)
    assert len(laid_out) == 8
    expected = data_ahead(monkeypatch)[0].take(0, NO_FLAGS)
    pairs = zip(found.batches, expected.batches, strict=True)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in pairs)


class WithAMethod:
    """A batch of a foreign kind."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def pin_memory(self) -> WithAMethod:
        return WithAMethod(self.tensor.pin_memory())


def test_all_tensors_of_a_batch_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is no such memory, so that a copy stands for it."""
    copies: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        copies.append(tensor.clone())
        return copies[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    one = torch.ones(1)
    objective = SupervisedFineTuning(mask="none", length=3)
    assert pinned(objective.blank(2)).document_ends is copies[-1]
    assert len(copies) == 4
    assert pinned(WithAMethod(one)).tensor is copies[-1]
    assert pinned({"a": [one, 2]})["a"] == [copies[-1], 2]
    assert pinned(one) is copies[-1]


def test_ranks_agree_on_their_hosts_whatever_the_backend_of_their_devices() -> None:
    run_on_fabric_ranks(check_agreement, 2)


@on_fabric_rank
def check_agreement() -> None:
    fabric = make_fabric(devices=2)
    rows = pad([sample_of([n, n + 1, n + 2]) for n in range(8)], length=3, pad_id=0)
    sharding = Sharding(
        global_batch_size=4, micro_batch_size=2, rank=fabric.global_rank, world_size=2
    )
    objective = SupervisedFineTuning(mask="none", length=3)
    for config, has_own in (("cpu:gloo,cuda:gloo", False), ("cpu:nccl,cuda:nccl", True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_backend_config", lambda config=config: config)
            ahead = DataAhead(
                fabric=fabric, rows=rows, sharding=sharding, seed=0, objective=objective
            )
        assert (ahead._sum._group is not None) is has_own
        work = ahead.take(0, (fabric.global_rank == 1, False))
        assert (int(work.weight), work.is_stopped, work.is_signalled) == (4 * 2, True, False)

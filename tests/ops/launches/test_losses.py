"""Losses in one launch are planned without copies of their logits, and for devices where Triton runs.

What the kernels compute is compared by `make gpu-correct`, and under Triton's interpreter in test_one_launch.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.ops.cuda_device import planned_for
from thunder_memsave.ops.families.loss_sums import Gradients, Wanted, multiplied
from thunder_memsave.ops.families.tiled_loss import (
    Head,
    LaunchedTile,
    LossOptions,
    losses_in_tiles,
    tile_rows,
)
from thunder_memsave.ops.launches import losses

TOKENS, WIDTH, CLASSES, ROWS = 64, 32, 4096, 16
LOGITS_BYTES = 2 * ROWS * CLASSES
CAPPED = LossOptions(label_smoothing=0.1, z_loss=1e-3, soft_cap=30.0, logit_scale=0.5)


def recorded(options: LossOptions, *, in_one_launch: bool) -> AtenRecord:
    """Return what the loss of a frozen head does on a device that is not here."""
    with FakeTensorMode(), torch.no_grad():
        hidden, weight, of_hidden = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in ((TOKENS, WIDTH), (CLASSES, WIDTH), (TOKENS, WIDTH))
        )
        targets = torch.empty(TOKENS, dtype=torch.int64, device="meta")
        factors = torch.empty((), device="meta")
        with AtenRecord((hidden, weight, of_hidden, targets, factors)) as record:
            losses_in_tiles(
                *(hidden, Head(weight), targets, options),
                rows_per_tile=ROWS,
                is_on_cuda=True,
                in_one_launch=in_one_launch,
                factors=factors,
                wanted=Wanted(hidden=True, weight=False, bias=False),
                make_gradients=partial(Gradients, of_hidden, None, None),
            )
    return record


@pytest.mark.parametrize("options", [LossOptions(), CAPPED], ids=["plain", "all"])
def test_a_tile_is_planned_with_its_logits_alone(options: LossOptions) -> None:
    with_copies, without = (recorded(options, in_one_launch=each) for each in (False, True))
    rows_bytes = 4 * 8 * (TOKENS + 6 * ROWS)  # losses, terms and targets
    assert LOGITS_BYTES < without.peak_bytes < LOGITS_BYTES + rows_bytes
    assert with_copies.peak_bytes > 3 * LOGITS_BYTES
    assert without.flops == with_copies.flops
    # Each tile: written by the product, read for its terms, read and written for its gradients, read by the product.
    # The weight is read by both products.
    moved = (5 * LOGITS_BYTES + 2 * 2 * CLASSES * WIDTH) * TOKENS // ROWS
    assert moved < without.moved_bytes < 1.02 * moved
    assert without.moved_bytes < with_copies.moved_bytes / 2


def test_tiles_without_copies_have_three_times_the_tokens() -> None:
    sizes = 8192, 128_256, torch.bfloat16, LossOptions()
    with_copies, without = (tile_rows(*sizes, in_one_launch=each) for each in (False, True))
    assert 2.5 * with_copies < without < 3.5 * with_copies


def test_only_16_bits_on_cuda_are_launched() -> None:
    x = torch.empty(1)
    assert not losses.applies(x, torch.bfloat16)
    with planned_for(torch.device("cuda"), (9, 0)):
        assert losses.applies(x, torch.bfloat16)
        assert losses.applies(x, torch.float16)
        assert not losses.applies(x, torch.float32)


def test_gradients_times_a_factor_go_once_through_memory() -> None:
    shape = CLASSES, WIDTH
    with FakeTensorMode(), planned_for(torch.device("cuda"), (9, 0)):
        value = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        factor = torch.empty((), device="meta")
        with AtenRecord((value, factor)) as record:
            result = multiplied(value, factor, in_one_launch=True)
    assert (result.shape, result.dtype, result.is_contiguous()) == (shape, value.dtype, True)
    assert record.moved_bytes == 2 * 2 * CLASSES * WIDTH
    assert record.peak_bytes == 2 * CLASSES * WIDTH


def test_targets_need_not_be_contiguous() -> None:
    targets = torch.arange(12).reshape(4, 3)[:, 1]
    tile = LaunchedTile(torch.zeros(4, 12, dtype=torch.bfloat16), targets, LossOptions())
    assert tile.targets.is_contiguous()
    assert torch.equal(tile.targets, targets)

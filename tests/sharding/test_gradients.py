"""Clipping sees the gradients of all ranks as one, and each replicated one once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.distributed import run_on_ranks
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.gradients import clip_norm, clip_value, global_norm
from thunder_memsave.sharding.rows import local_rows, own_rows, shard_module, take_rows
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded


def make_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    net.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    net.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return net


def set_gradients(net: nn.Module, dp: DataParallel | None = None) -> nn.Module:
    """Set the same gradients of the whole parameters, on each rank its rows of them."""
    generator = torch.Generator().manual_seed(1)
    for name, p in net.named_parameters():
        shape = vars(p).get("unsharded_shape", p.shape)
        grad = torch.randn(shape, generator=generator, dtype=p.dtype)
        if name != "unused":
            sharded = dp is not None and is_sharded(p)
            p.grad = take_rows(grad, own_rows(grad.shape, dp)) if dp and sharded else grad
    return net


def check_clipping(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))
    modes: tuple[Literal["none", "zero2"], ...] = ("none", "zero2")
    for mode in modes:
        dp = DataParallel(mode=mode, group=group)
        for norm_type in (1.0, 2.0, 3.0, math.inf):
            _check_norm(dp, norm_type)
        _check_value(dp)
        _check_torchs_clipping(dp)
        _check_reductions(dp)
        _check_copies(dp)
        _check_nonfinite(rank, dp)
        _check_no_gradients(dp)
        _check_double(dp)
    _check_bfloat16(DataParallel(mode="zero2", group=group))


def _check_double(dp: DataParallel) -> None:
    net, reference = make_net().double(), set_gradients(make_net().double())
    shard_module(net, dp)
    norm = clip_norm(set_gradients(net, dp).parameters(), max_norm=0.5, data_parallel=dp)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    assert norm.dtype is torch.float64
    assert float(norm) == pytest.approx(float(expected), rel=1e-12)  # the order of summation


def _check_bfloat16(dp: DataParallel) -> None:
    """The norm itself is not rounded to the gradients' eight bits."""
    net, exact = make_net().bfloat16(), set_gradients(make_net().bfloat16()).float()
    shard_module(net, dp)
    parameters = list(set_gradients(net, dp).parameters())
    norm = global_norm(parameters, data_parallel=dp)
    grads = [p.grad.float() for p in exact.parameters() if p.grad is not None]
    assert float(norm) == pytest.approx(float(nn.utils.get_total_norm(grads)), rel=1e-6)


REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "norm of order 3": lambda g: g.norm(3),
    "norm of order 0": lambda g: torch.linalg.vector_norm(g, 0),
    "norm of order -1": lambda g: torch.linalg.vector_norm(g, -1),
    "norm of the data": lambda g: g.detach().data.norm(2),
    "norm in double": lambda g: torch.linalg.norm(g.cpu(), dtype=torch.float64),
    "norm by hand": lambda g: g.pow(2).sum() ** 0.5,
    "sum in double": lambda g: g.sum(dtype=torch.float64),
    "count": lambda g: (g > 0).sum(),
    "mean": lambda g: g.abs().mean(),
    "max": lambda g: torch.max(-g.abs()),
    "min": lambda g: g.abs().min().item(),
    "amin": lambda g: torch.amin(g.abs()),
    "nonzero": lambda g: (g == 0).count_nonzero(),
    "all": lambda g: bool((g != 0).all()),
    "any": lambda g: torch.any(g == 0),
    "finite": lambda g: torch.isfinite(g).all(),
    "foreach max": lambda g: torch._foreach_max([-g.abs(), g])[0],
    "equal": lambda g: torch.equal(g, g * 1),
}


def _sharded_net(dp: DataParallel) -> nn.Module:
    net = make_net()
    shard_module(net, dp)
    return net


def _check_norm(dp: DataParallel, norm_type: float) -> None:
    net, reference = set_gradients(_sharded_net(dp), dp), set_gradients(make_net())
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
    norm = clip_norm(net.parameters(), max_norm=0.5, norm_type=norm_type, data_parallel=dp)
    # Sums in another order: a few units in the last place of float32.
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    _check_same_gradients(net, reference, dp)


def _check_same_gradients(net: nn.Module, reference: nn.Module, dp: DataParallel) -> None:
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None
            continue
        assert p.grad is not None
        rows = own_rows(q.shape, dp) if is_sharded(p) else None
        expected = q.grad[rows.start : rows.stop] if rows else q.grad
        torch.testing.assert_close(local_rows(p.grad, p), expected, rtol=1e-6, atol=1e-9)
        if rows:
            assert not as_rows(p.grad)[rows.num_real_rows :].any()


def _check_value(dp: DataParallel) -> None:
    net, reference = set_gradients(_sharded_net(dp), dp), set_gradients(make_net())
    nn.utils.clip_grad_value_(reference.parameters(), 0.3)
    clip_value(net.parameters(), clip_value=0.3)
    _check_same_gradients(net, reference, dp)


def _check_nonfinite(rank: int, dp: DataParallel) -> None:
    net = set_gradients(_sharded_net(dp), dp)
    grad = net.get_parameter("0.weight").grad
    assert grad is not None
    if rank == 1 or dp.mode == "none":
        as_rows(grad)[0, 0] = math.inf
    with pytest.raises(RuntimeError, match=r"norm of order 2 is inf.*error_if_nonfinite=False"):
        clip_norm(net.parameters(), max_norm=1.0, data_parallel=dp)
    norm = clip_norm(net.parameters(), max_norm=1.0, error_if_nonfinite=False, data_parallel=dp)
    assert norm == math.inf


def _check_torchs_clipping(dp: DataParallel) -> None:
    """Functions of torch that are called directly, as on the whole gradients."""
    for norm_type in (1.0, 2.0, math.inf):
        for foreach in (None, False):
            net, reference = set_gradients(_sharded_net(dp), dp), set_gradients(make_net())
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type, foreach=foreach)
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            _check_same_gradients(net, reference, dp)
    nn.utils.clip_grad_value_(net.parameters(), 0.1)
    nn.utils.clip_grad_value_(reference.parameters(), 0.1)
    _check_same_gradients(net, reference, dp)


def _check_reductions(dp: DataParallel) -> None:
    """With three, two and no rows on a rank, and padding that would change most of these numbers."""
    net, reference = set_gradients(_sharded_net(dp), dp), set_gradients(make_net())
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        for name, reduce in REDUCTIONS.items():
            if p.grad is not None and q.grad is not None:
                number = torch.as_tensor(reduce(p.grad))
                assert type(number) is Tensor, name
                expected = torch.as_tensor(reduce(q.grad))
                torch.testing.assert_close(number, expected, rtol=1e-6, atol=1e-6, msg=name)
        if p.grad is not None and is_sharded(p):
            assert torch.equal(p.grad, p.grad.clone())
            changed = p.grad + (dist.get_rank() == 0)
            assert not torch.equal(p.grad, changed)
            assert not torch.allclose(p.grad, changed)


def _check_copies(dp: DataParallel) -> None:
    """Sums of sixteen bits are rounded once; a copy of the module has gradients of its own."""
    net = copy.deepcopy(_sharded_net(dp)).bfloat16()
    reference = set_gradients(make_net().bfloat16())
    grads = [p.grad for p in set_gradients(net, dp).parameters() if p.grad is not None]
    whole = [q.grad for q in reference.parameters() if q.grad is not None]
    for norm, expected in zip(torch._foreach_norm(grads), whole, strict=True):
        exact = expected.double().norm()
        assert norm.dtype is torch.bfloat16
        assert norm == exact.to(torch.bfloat16)


def _check_no_gradients(dp: DataParallel) -> None:
    assert clip_norm(_sharded_net(dp).parameters(), max_norm=1.0, data_parallel=dp) == 0


def test_clipping_on_two_ranks_equals_one_process(tmp_path: Path) -> None:
    run_on_ranks(check_clipping, 2, tmp_path / "rendezvous")


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32() -> None:
    net = set_gradients(make_net().bfloat16())
    exact = nn.utils.get_total_norm(
        [p.grad.double() for p in net.parameters() if p.grad is not None]
    )
    norm = global_norm(list(net.parameters()), data_parallel=None)
    assert float(norm) == pytest.approx(float(exact), rel=1e-6)


def test_small_gradients_are_left_bit_identical() -> None:
    net, reference = set_gradients(make_net()), set_gradients(make_net())
    norm = clip_norm(net.parameters(), max_norm=1e6, data_parallel=None)
    assert norm == global_norm(list(net.parameters()), data_parallel=None)
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert p.grad is None or (q.grad is not None and torch.equal(p.grad, q.grad))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_limits_that_are_not_positive_are_refused(value: float) -> None:
    net = set_gradients(make_net())
    with pytest.raises(ValueError, match=r"max_norm is .*must be greater than 0"):
        clip_norm(net.parameters(), max_norm=value, data_parallel=None)
    with pytest.raises(ValueError, match=r"norm_type is .*must be greater than 0"):
        clip_norm(net.parameters(), max_norm=1.0, norm_type=value, data_parallel=None)
    with pytest.raises(ValueError, match=r"clip_value is .*must be greater than 0"):
        clip_value(net.parameters(), clip_value=value)

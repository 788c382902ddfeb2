"""Linears in NVFP4 round their gradients by a seed that forward draws: replayed, never drawn again."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from thunder.core.symbol import BoundSymbol
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from harness.fp8_linears import fp8_module, ops
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.fp8.kernels import torch_backend
from thunder_memsave.fp8.kernels.nvfp4_blocks import NVFP4_BLOCK
from thunder_memsave.frontend.rewrites import linear_losses
from thunder_memsave.measure.devices import device_at
from thunder_memsave.passes.recompute import PREFIX
from thunder_memsave.settings.problems import ConfigError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 64)
    ).bfloat16()


def batch() -> Tensor:
    return torch.randn(40, 32, generator=torch.Generator().manual_seed(3)).bfloat16()


def gradients(
    module: Callable[..., Any], parameters: Sequence[Tensor], **options: Any
) -> list[Tensor]:
    torch.manual_seed(1)
    loss = module(batch()).float().square().mean()
    return list(torch.autograd.grad(loss, parameters, **options))


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


@pytest.fixture(scope="module")
def module() -> CompiledModule:
    return fp8_module(net(), recipe="nvfp4")


def test_gradients_are_those_of_the_casts_with_the_seed(module: CompiledModule) -> None:
    linear = nn.Linear(32, 96).bfloat16()
    compiled = fp8_module(linear, recipe="nvfp4")
    x, grad = batch().requires_grad_(), torch.randn(40, 96).bfloat16()
    torch.manual_seed(1)
    found = torch.autograd.grad(compiled(x), [x, linear.weight, linear.bias], grad)
    torch.manual_seed(1)
    seed = torch.randint(2**62, (1,))
    kernels, weight = torch_backend, linear.weight.detach()
    rows, columns = (
        cast(grad, 1, seed) for cast in (kernels.quantize_nvfp4, kernels.quantize_nvfp4_columns)
    )
    of_weight = kernels.quantize_nvfp4_columns(weight, NVFP4_BLOCK, None)
    of_x = kernels.quantize_nvfp4_columns(x.detach(), 1, None)
    assert torch.equal(found[0], kernels.gemm_nvfp4(*rows, *of_weight, None, torch.bfloat16))
    assert torch.equal(found[1], kernels.gemm_nvfp4(*columns, *of_x, None, torch.bfloat16))
    assert torch.equal(found[2], grad.sum(0))


def test_each_call_draws_seeds_and_a_second_backward_none(module: CompiledModule) -> None:
    parameters = list(module.parameters())
    torch.manual_seed(1)
    losses = [module(batch()).float().square().mean() for _ in range(2)]
    after_forward = torch.get_rng_state()
    first, other, again = (
        list(torch.autograd.grad(losses[i], parameters, retain_graph=True)) for i in (0, 1, 0)
    )
    assert torch.equal(torch.get_rng_state(), after_forward)
    assert same(first, again)
    assert not same(first, other)
    assert same(gradients(module, parameters), first)


def test_an_evaluation_draws_nothing(module: CompiledModule) -> None:
    plain = fp8_module(nn.Sequential(nn.Linear(32, 64)).bfloat16(), recipe="nvfp4")
    before = torch.get_rng_state()
    with torch.no_grad():
        plain(batch())
    assert torch.equal(torch.get_rng_state(), before)


def test_backward_keeps_an_input_in_4_bits_and_8_bytes_of_seed(module: CompiledModule) -> None:
    module(batch())
    forward = module.captures[0].forward_traces[-1]
    assert len(ops(forward, "seed")) == 2
    kept = [(tuple(p.shape), p.dtype.bytes) for p in forward.output[1][0]]
    numbers = [((32, 32), 1), ((96, 32), 1)]  # of 40 tokens, with zeros up to 64
    assert all(shape in kept for shape in [*numbers, ((32, 4), 1), ((96, 4), 1)])
    assert kept.count(((1,), 8)) == 2


@pytest.mark.parametrize("backend", ["torch", "transformer_engine"])
def test_what_is_recomputed_has_the_bits_of_what_is_kept(
    backend: Any, request: pytest.FixtureRequest
) -> None:
    if backend == "transformer_engine":
        request.getfixturevalue("transformer_engine_on_blackwell")
    model, found, num_again = net(), {}, {}
    for policy in ("keep_all", "recompute_all"):
        planner = MemoryPlanner(
            MemoryConfig(policy=policy),
            device=device_at(torch.device("cpu")),
            budget_bytes=None,
        )
        compiled = fp8_module(
            copy.deepcopy(model), recipe="nvfp4", backend=backend, planner=planner
        )
        found[policy] = gradients(compiled, list(compiled.parameters()))
        again = {
            kind: [b for b in ops(compiled.captures[0].backward_traces[-1], kind) if is_clone(b)]
            for kind in ("quantize", "seed")
        }
        num_again[policy] = [len(clones) for clones in again.values()]
        assert all("replaying" in b.sym.name for b in again["seed"])
    assert same(found["recompute_all"], found["keep_all"])
    # Both inputs, and the first weight, of whose product the second input comes; the first seed is kept.
    assert num_again == {"keep_all": [0, 0], "recompute_all": [3, 1]}


def is_clone(bsym: BoundSymbol) -> bool:
    return bsym.flat_proxy_outs[0].name.startswith(PREFIX)


class Head(nn.Module):
    """A head in NVFP4 and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 64)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.head(x).float(), targets)


def test_the_loss_of_a_head_is_not_in_tiles_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_losses, "FEWEST_LOGITS", 1)
    head = fp8_module(Head().bfloat16(), recipe="nvfp4")
    head(batch().requires_grad_(), torch.arange(40)).backward()
    names = [b.sym.name for b in head.captures[0].forward_traces[-1].bound_symbols]
    assert "fp8_gemm_nvfp4_torch" in names
    assert not any("linear_cross_entropy" in name for name in names)
    assert (
        "The loss of 'head' is not computed in tiles of tokens, because that linear layer computes in nvfp4: its "
        "logits, 40 x 64, exist whole, and so do their gradients. Add 'head' to fp8.skip_modules to have the loss in "
        "tiles."
    ) in caplog.messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_than_bfloat16_are_refused(dtype: torch.dtype) -> None:
    message = (
        "fp8.recipe is nvfp4, whose random Hadamard transform takes bfloat16 alone, and a linear layer in fp8 computes "
        f"in {str(dtype).removeprefix('torch.')}: set `model.dtype` of a run file to bfloat16, or Fabric's `precision` "
        "to bf16-true or bf16-mixed, or `fp8.recipe` to mxfp8."
    )
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        fp8_module(net().to(dtype), recipe="nvfp4")(batch().to(dtype))
    assert error.value.key == "fp8.recipe"


def test_weights_in_float32_are_cast_uncast_under_autocast() -> None:
    linear = nn.Linear(32, 96)
    compiled = fp8_module(linear, recipe="nvfp4")
    x = batch()
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(x)
    weight = torch_backend.quantize_nvfp4(linear.weight.detach(), NVFP4_BLOCK, None)
    bias = linear.bias.detach().bfloat16()
    of_x = torch_backend.quantize_nvfp4(x, 1, None)
    expected = torch_backend.gemm_nvfp4(*of_x, *weight, bias, torch.bfloat16)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


def test_a_frozen_weight_is_cast_once_in_both_directions() -> None:
    model = net()
    next(model.children()).requires_grad_(requires_grad=False)
    compiled = fp8_module(model, recipe="nvfp4")
    x = batch().requires_grad_()
    torch.manual_seed(1)
    (found,) = torch.autograd.grad(compiled(x).float().square().mean(), [x])
    trace = compiled.captures[0]
    casts = [
        *ops(trace.forward_traces[-1], "quantize"),
        *ops(trace.backward_traces[-1], "quantize"),
    ]
    # Two inputs and the trained weight; two gradients by rows, the weight by columns; and one gradient by columns.
    assert len(casts) == 3 + 3 + 1
    trained = fp8_module(net(), recipe="nvfp4")
    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(trained(x).float().square().mean(), [x])
    assert torch.equal(found, expected)

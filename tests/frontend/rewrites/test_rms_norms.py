"""A norm that is written out is one operator, with the same bits; what only resembles one stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.measure.layouts import Layout
from thunder_memsave.ops.table import is_one_kernel

WIDTH, EPS = 16, 1e-6
Written = Callable[[Tensor, Tensor], Tensor]


def of_llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def of_t5(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    normalized = x * torch.rsqrt(variance + EPS)
    return weight * (normalized if weight.dtype is torch.float32 else normalized.to(weight.dtype))


def of_gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normalized * (1.0 + weight.float())).type_as(x)


def with_other_words(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.type(torch.float32)
    mean = torch.mean(torch.square(wide), dim=(1,), keepdim=True)
    return (EPS + mean).rsqrt().mul(wide).to(dtype=x.dtype).mul(weight)


def by_itself(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return torch.rsqrt((wide**2).mean(1, keepdim=True) + EPS) * wide + weight


def used_twice(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return normalized.to(x.dtype) * weight + normalized.to(x.dtype)


class Block(nn.Module):
    def __init__(self, norm: Written, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x, self.weight).to(self.linear.weight.dtype))


def check(norm: Written, dtype: torch.dtype, *, rtol: float = 0.0) -> list[str]:
    """Compare the bits with eager's, unless they may differ; return the names of forward's operators."""
    block = Block(norm, dtype)
    compiled = CompiledModule(block)
    x = torch.randn(8, WIDTH, dtype=dtype, requires_grad=True)
    both = []
    for call in (block, compiled):
        output = call(x)
        grads = torch.autograd.grad(output.float().square().sum(), [x, *block.parameters()])
        both.append([output, *grads])
    torch.testing.assert_close(both[1], both[0], rtol=rtol, atol=rtol)
    return [b.sym.name for b in compiled.captures[-1].forward_traces[-1].bound_symbols]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "norm", [of_llama, of_t5, of_gemma, with_other_words, by_itself, used_twice]
)
def test_a_written_out_norm_is_one_operator_with_the_same_bits(
    norm: Written, dtype: torch.dtype
) -> None:
    names = check(norm, dtype)
    if norm is of_t5 and dtype is torch.bfloat16:  # two casts of x
        assert "rms_norm_kernel" not in names
        return
    assert names.count("rms_norm_kernel") == 1
    assert not {"aten_rsqrt", "aten_mean_dim", "aten_pow_Tensor_Scalar"} & set(names)
    # In float32 nothing is rounded before the weight.
    is_weighted = norm is of_gemma or (
        dtype is torch.float32 and norm in (of_llama, of_t5, with_other_words)
    )
    assert ("aten_mul_Tensor" in names) is not (is_weighted or norm is by_itself)


def cast_twice(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.to(torch.float64).pow(2).mean(-1, keepdim=True)
    return weight * (x.to(torch.float64) * torch.rsqrt(variance + EPS)).to(x.dtype)


def squared_by_a_product(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)


def changed_in_place(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    normalized.mul_(2.0)
    return weight * normalized.to(x.dtype)


def with_a_constant_variance(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    with torch.no_grad():
        variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def over_rows(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + EPS)).to(x.dtype)


def of_another(x: Tensor, weight: Tensor) -> Tensor:
    wide, other = x.float(), x.float() + 1.0
    return weight * (wide * torch.rsqrt(other.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def cubed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    root = torch.rsqrt(wide.abs().pow(3).mean(-1, keepdim=True) + EPS)
    return weight * (wide * root).to(x.dtype)


def in_two_bytes(x: Tensor, weight: Tensor) -> Tensor:
    narrow = x.to(torch.bfloat16)
    return weight * (narrow * torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + EPS))


@pytest.mark.parametrize(
    ("norm", "rtol"),
    [
        (cast_twice, 1e-5),
        (squared_by_a_product, 1e-5),
        (changed_in_place, 1e-5),
        (with_a_constant_variance, 1e-5),
        (over_rows, 1e-5),
        (of_another, 1e-5),
        (cubed, 1e-5),
        (in_two_bytes, 0.1),  # each of its operations rounds
    ],
)
def test_what_only_resembles_a_norm_stays_as_it_is(norm: Written, rtol: float) -> None:
    assert "rms_norm_kernel" not in check(norm, torch.float32, rtol=rtol)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_on_cuda_it_is_one_kernel_where_the_weight_has_the_values_dtype(
    weight_dtype: torch.dtype,
) -> None:
    def layout(*shape: int, dtype: torch.dtype, device: str) -> Layout:
        return Layout(shape, (1,) * len(shape), 0, dtype, device, 0)

    for device, is_there in (("cuda:0", weight_dtype is torch.bfloat16), ("cpu", False)):
        value = layout(8, WIDTH, dtype=torch.bfloat16, device=device)
        weight = layout(WIDTH, dtype=weight_dtype, device=device)
        rstd = layout(8, 1, dtype=torch.float32, device=device)
        assert is_one_kernel("rms_norm_kernel", [value, weight]) is is_there
        for name in ("rms_norm_kernel_backward", "rms_norm_kernel_weight_backward"):
            assert is_one_kernel(name, [value, value, rstd, weight]) is is_there
        assert is_one_kernel("rms_norm_kernel_backward", [value, value, rstd]) is (device != "cpu")

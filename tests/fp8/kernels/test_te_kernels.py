"""The emulated kernels do what the sources of TransformerEngine's kernels say, in the particular cases."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from harness import te_kernels

E4M3, E5M2 = 7, 8  # of TransformerEngine's DType
FLOAT32_MAX = torch.finfo(torch.float32).max


def scale_of(amax: float, **options: float | bool) -> float:
    found = te_kernels.scale_of_amax(
        torch.tensor([amax]),
        E4M3,
        epsilon=float(options.get("epsilon", 0.0)),
        power_of_2=bool(options.get("power_of_2", False)),
    )
    return float(found)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(2.0, 224.0), (0.0, 1.0), (torch.inf, 1.0), (torch.nan, 1.0), (1e-44, FLOAT32_MAX)],
)
def test_a_scale_is_1_where_an_amax_says_nothing_and_finite_where_it_is_tiny(
    amax: float, scale: float
) -> None:
    assert scale_of(amax) == pytest.approx(scale, rel=0, abs=0)


def test_powers_of_2_are_rounded_down_and_an_epsilon_is_the_least_amax() -> None:
    assert scale_of(2.0, power_of_2=True) == 128.0
    assert scale_of(0.0, epsilon=4.0) == 112.0


def test_an_amax_counts_infinities_and_drops_nan() -> None:
    assert te_kernels.amax_of(torch.tensor([1.0, -3.0, torch.nan])) == 3.0
    assert te_kernels.amax_of(torch.tensor([1.0, -torch.inf, torch.nan])) == torch.inf
    assert te_kernels.amax_of(torch.empty(0, 4)) == 0.0


def test_casts_saturate_and_keep_nan() -> None:
    values = torch.tensor([1e6, -torch.inf, torch.nan, 0.5])
    cast = te_kernels.cast(values, E5M2).view(torch.float8_e5m2).float()
    assert cast[:2].tolist() == [57344.0, -57344.0]
    assert cast[2].isnan()
    assert cast[3] == 0.5


def update(history: list[float], scale: float, *, algo: str = "max") -> tuple[list[float], float]:
    """One fused update with the margin 1, of a tensor whose newest amax stands first."""
    histories, scales = torch.tensor(history)[:, None], torch.tensor([scale])
    te_kernels.fused_amax_and_scale_update_after_reduction(
        histories[0].clone(), [histories], [scales], algo, E4M3, 1
    )
    return histories.flatten().tolist(), float(scales)


def test_the_fused_update_rolls_the_history_and_scales_by_its_largest_amax() -> None:
    # The oldest amax, 4, is counted once more before it leaves.
    assert update([2.0, 4.0, 1.0], 7.0) == ([0.0, 1.0, 2.0], 56.0)
    assert update([2.0, 4.0, 8.0], 7.0) == ([0.0, 8.0, 2.0], 28.0)
    assert update([2.0, 4.0, 8.0], 7.0, algo="most_recent") == ([0.0, 8.0, 2.0], 112.0)


def test_the_fused_update_leaves_all_as_it_is_where_nothing_was_seen() -> None:
    assert update([0.0, 4.0, 8.0], 7.0) == ([0.0, 4.0, 8.0], 7.0)


def test_the_fused_update_keeps_the_scale_of_an_infinite_amax() -> None:
    assert update([torch.inf, 4.0, 1.0], 7.0) == ([0.0, 1.0, torch.inf], 7.0)


def test_the_fused_update_is_that_of_the_python_schedule_where_something_was_seen(
    transformer_engine: ModuleType,
) -> None:
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    recipe = importlib.import_module("transformer_engine.common.recipe").DelayedScaling(
        amax_history_len=4
    )
    fused, python = (torch.zeros(4, 2), torch.ones(2)), (torch.zeros(4, 2), torch.ones(2))
    for _ in range(6):
        amax = torch.rand(2) + 0.1
        for history, _ in (fused, python):
            history[0].copy_(amax)
        te_kernels.fused_amax_and_scale_update_after_reduction(
            amax, [fused[0]], [fused[1]], "max", transformer_engine.DType.kFloat8E4M3, 0
        )
        quantization._amax_and_scale_update(*python, 448.0, recipe)
        assert torch.equal(fused[0], python[0])
        # The kernel divides; torch computes a number over a tensor with one rounding more.
        torch.testing.assert_close(fused[1], python[1], rtol=2**-22, atol=0)


def test_a_gemm_refuses_an_operand_that_does_not_lie_as_hopper_reads_it(
    transformer_engine: ModuleType,
) -> None:
    operand = transformer_engine.Float8TensorStorage(
        data=torch.zeros(16, 16, dtype=torch.uint8),
        fp8_scale_inv=torch.ones(1),
        fp8_dtype=transformer_engine.DType.kFloat8E4M3,
    )
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    product: Tensor = gemm(operand, operand, out_dtype=torch.bfloat16, layout="TN")[0]
    assert product.shape == (16, 16)
    with pytest.raises(AssertionError, match="the column-wise data of a GEMM operand is missing"):
        gemm(operand, operand, out_dtype=torch.bfloat16, layout="NN")

"""The backend has TransformerEngine's bits, from plain tensors; kernels are emulated, its Python is the real one."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import te_kernels
from harness.te_linear import (
    Result,
    Step,
    TransformerEngine,
    assert_same,
    recipe_named,
    steps,
    te_update,
)
from thunder_memsave.aten.record import AtenRecord, storage_id
from thunder_memsave.fp8.kernels import te_backend, torch_backend

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HISTORY_LEN = 5
Quantized = tuple[Tensor, Tensor]


Quantize = Callable[[Tensor, str], Quantized]


def linear(
    step: Step, backend: ModuleType, quantize: Quantize, *, fast: bool, blocks: bool
) -> Result:
    """The same linear by a backend's functions, as our operators combine them."""
    x, grad = step.x.flatten(0, 1), step.grad.flatten(0, 1)
    dtype = x.dtype
    qx, qw, qg = quantize(x, "input"), quantize(step.weight, "weight"), quantize(grad, "grad")
    if blocks:
        columns_x, columns_g = (
            quantize(x.t().contiguous(), "input"),
            quantize(grad.t().contiguous(), "grad"),
        )
        columns_w = (backend.transpose(qw[0]), qw[1].t().contiguous())
    else:
        columns_x, columns_w, columns_g = ((backend.transpose(q), s) for q, s in (qx, qw, qg))
    y = backend.gemm(*qx, *qw, step.bias, dtype, fast)
    grad_input = backend.gemm(*qg, *columns_w, None, dtype, False)
    grad_weight = backend.gemm(*columns_g, *columns_x, None, dtype, False)
    return Result(
        y=y.view_as(step.grad), grad_input=grad_input.view_as(step.x), grad_weight=grad_weight
    )


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_delayed_scaling_is_that_of_transformer_engine_for_20_steps_with_emulated_kernels(
    algo: str,
) -> None:
    recipe = recipe_named(
        "DelayedScaling", amax_history_len=HISTORY_LEN, margin=1, amax_compute_algo=algo
    )
    reference = TransformerEngine(recipe)
    histories = {"forward": torch.zeros(HISTORY_LEN, 2), "backward": torch.zeros(HISTORY_LEN, 1)}
    scales = {"forward": torch.ones(2), "backward": torch.ones(1)}

    def quantize(x: Tensor, role: str) -> Quantized:
        mode, dtype = ("backward", E5M2) if role == "grad" else ("forward", E4M3)
        index = int(role == "weight")
        return te_backend.quantize_delayed(x, scales[mode], histories[mode], index, dtype, True)

    for number, step in enumerate(steps()):
        result = linear(step, te_backend, quantize, fast=True, blocks=False)
        for mode in histories:
            te_update(histories[mode], scales[mode], recipe, forward=mode == "forward")
        state = [t for mode in histories for t in (histories[mode], scales[mode])]
        result = Result(
            y=result.y, grad_input=result.grad_input, grad_weight=result.grad_weight, state=state
        )
        assert_same(result, reference.run(step), number)


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("power_of_2", [False, True])
def test_current_scaling_is_that_of_transformer_engine_for_20_steps_with_emulated_kernels(
    power_of_2: bool,
) -> None:
    recipe = recipe_named("Float8CurrentScaling", use_power_2_scales=power_of_2)
    reference = TransformerEngine(recipe)

    def quantize(x: Tensor, role: str) -> Quantized:
        dtype = E5M2 if role == "grad" else E4M3
        return te_backend.quantize_current(x, dtype, 0.0, power_of_2)

    for number, step in enumerate(steps()):
        result = linear(step, te_backend, quantize, fast=True, blocks=False)
        assert_same(result, reference.run(step), number)


@pytest.mark.usefixtures("transformer_engine")
def test_block_scaling_is_that_of_transformer_engine_for_20_steps_with_emulated_kernels() -> None:
    reference = TransformerEngine(recipe_named("Float8BlockScaling"))

    def quantize(x: Tensor, role: str) -> Quantized:
        return te_backend.quantize_block(x, E4M3, 128 if role == "weight" else 1)

    for number, step in enumerate(steps()):
        result = linear(step, te_backend, quantize, fast=False, blocks=True)
        assert_same(result, reference.run(step), number)


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_backends_give_the_same_bytes_and_scales_with_emulated_kernels(
    dtype: torch.dtype,
) -> None:
    for number, step in enumerate(steps()):
        x = step.x.flatten(0, 1).to(dtype)
        for name, arguments in (
            ("quantize_current", (E5M2,)),
            ("quantize_current", (E4M3, 1e-3, True)),
            ("quantize_block", (E4M3, 1)),
            ("quantize_block", (E4M3, 128)),
        ):
            ours, theirs = (getattr(m, name)(x, *arguments) for m in (torch_backend, te_backend))
            assert torch.equal(ours[0].view(torch.uint8), theirs[0].view(torch.uint8)), (
                name,
                number,
            )
            assert torch.equal(ours[1], theirs[1]), (name, number)
            assert ours[0].dtype == theirs[0].dtype


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", ["current", "block"])
def test_both_backends_multiply_alike_with_emulated_kernels(
    scaling: str, out_dtype: torch.dtype
) -> None:
    x, weight, bias = torch.randn(32, 144), torch.randn(48, 144), torch.randn(48)
    if scaling == "block":
        a, b = (
            torch_backend.quantize_block(x, E4M3, 1),
            torch_backend.quantize_block(weight, E4M3, 128),
        )
    else:
        a, b = (torch_backend.quantize_current(t, E4M3) for t in (x, weight))
    theirs = te_backend.gemm(*a, *b, bias, out_dtype)
    ours = torch_backend.gemm(*a, *b, bias, out_dtype)
    exact = torch_backend.dequantize(*a).double() @ torch_backend.dequantize(*b).double().t() + bias
    # One rounding to the result's type, and sums of 144 products in float32.
    bits = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    assert ours.dtype == theirs.dtype == out_dtype
    assert (theirs.double() - exact).abs().max() <= bits[out_dtype] * exact.abs().max()
    assert (theirs.double() - ours.double()).abs().max() <= bits[out_dtype] * exact.abs().max()


@pytest.mark.usefixtures("transformer_engine")
def test_an_evaluation_records_no_amax_with_emulated_kernels() -> None:
    history, scale = torch.zeros(3, 2), torch.full((2,), 4.0)
    q, scale_inv = te_backend.quantize_delayed(torch.randn(16, 32), scale, history, 1, E4M3, False)
    assert not history.any()
    assert q.dtype == E4M3
    assert scale_inv.tolist() == [0.25]


@pytest.mark.usefixtures("transformer_engine")
def test_the_amax_is_a_running_maximum_and_the_scale_a_copy_with_emulated_kernels() -> None:
    history, scale = torch.zeros(3, 2), torch.ones(2)
    for largest in (3.0, 7.0, 5.0):
        x = torch.full((16, 32), -largest, dtype=torch.bfloat16)
        _, scale_inv = te_backend.quantize_delayed(x, scale, history, 1, E4M3, True)
    assert history.tolist() == [[0.0, 7.0], [0.0, 0.0], [0.0, 0.0]]
    scale.fill_(2.0)
    assert scale_inv.tolist() == [1.0]


@pytest.mark.usefixtures("transformer_engine")
def test_only_fast_accumulation_asks_for_no_split_with_emulated_kernels() -> None:
    a = torch_backend.quantize_current(torch.randn(16, 32), E4M3)
    b = torch_backend.quantize_current(torch.randn(48, 32), E4M3)
    te_kernels.calls.clear()
    for fast in (True, False):
        te_backend.gemm(*a, *b, None, torch.bfloat16, fast)
    asked = [(c.layout, c.m, c.n, c.k, c.split_accumulator) for c in te_kernels.calls.gemms]
    assert asked == [("TN", 16, 48, 32, False), ("TN", 16, 48, 32, True)]


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_rows_of_any_number_are_padded_for_the_kernel_with_emulated_kernels(recipe: str) -> None:
    """Its GEMM refuses fp8 rows that are no multiple of 16 bytes: "Caller must pad."."""
    grad, x = torch.randn(48, 24).bfloat16(), torch.randn(32, 24).bfloat16()  # transposed: 24 rows

    def quantize(backend: ModuleType, value: Tensor) -> tuple[Tensor, Tensor]:
        if recipe == "current":
            return backend.quantize_current(value, E4M3)
        return backend.quantize_block(value, E4M3, 1)

    product, expected = (
        backend.gemm(*quantize(backend, grad), *quantize(backend, x), None, torch.float32)
        for backend in (te_backend, torch_backend)
    )
    (called,) = te_kernels.calls.gemms
    assert (called.m, called.n, called.k) == (48, 32, 32)
    # Zeros may be added in another order.
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("transformer_engine")
def test_nothing_is_made_that_a_gemm_does_not_read_with_emulated_kernels() -> None:
    """No copy by columns beside the one by rows: `transpose` makes it where a gradient wants it."""
    x = torch.randn(16, 128)
    q, _ = te_backend.quantize_current(x, E4M3)
    block, scales = te_backend.quantize_block(x, E4M3, 1)
    assert te_kernels.calls.transposed == []
    assert scales.untyped_storage().nbytes() == 16 * 4
    for data in (q, block):
        assert data.untyped_storage().nbytes() == x.numel()
    assert torch.equal(te_backend.transpose(q).view(torch.uint8), q.view(torch.uint8).t())
    assert te_kernels.calls.transposed == [(16, 128)]


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("records", [False, True])
def test_on_tensors_without_data_it_says_what_is_made_and_written_with_emulated_kernels(
    records: bool,
) -> None:
    def run() -> list[Tensor]:
        x, weight = torch.randn(32, 256).bfloat16(), torch.randn(160, 256).bfloat16()
        history, scale = torch.zeros(3, 2), torch.ones(2)
        qx = te_backend.quantize_delayed(x, scale, history, 0, E4M3, records)
        qw = te_backend.quantize_current(weight, E4M3)
        bx, bw = te_backend.quantize_block(x, E4M3, 1), te_backend.quantize_block(weight, E4M3, 128)
        columns = te_backend.transpose(qx[0])
        products = [
            te_backend.gemm(*qx, *qw, None, torch.bfloat16),
            te_backend.gemm(*bx, *bw, weight[:, 0].float(), torch.float32),
        ]
        return [*qx, *qw, *bx, *bw, columns, *products, history]

    expected = run()
    with FakeTensorMode():
        found = run()
    for ours, real in zip(found, expected, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("records", [False, True])
def test_without_data_only_a_recorded_amax_is_written(records: bool) -> None:
    with FakeTensorMode():
        x, history, scale = torch.randn(32, 64), torch.zeros(3, 2), torch.ones(2)
        with AtenRecord([x, history, scale]) as record:
            te_backend.quantize_delayed(x, scale, history, 0, E4M3, records)
    assert record.written == ({storage_id(history)} if records else set())


def test_without_data_the_work_of_a_product_is_known() -> None:
    with FakeTensorMode():
        a, b = torch.empty(32, 64, dtype=E4M3), torch.empty(48, 64, dtype=E4M3)
        one = torch.ones(1)
        with AtenRecord([a, b, one]) as record:
            te_backend.gemm(a, one, b, one, None, torch.bfloat16)
    assert record.flops == 2 * 32 * 64 * 48
    assert record.peak_bytes == 32 * 48 * 2


@pytest.mark.parametrize("num_rows", [32, 40, 37])
def test_without_data_a_sum_over_any_number_of_rows_passes_the_checks_of_cuda(
    num_rows: int,
) -> None:
    with FakeTensorMode():
        a, b = (torch.empty(n, num_rows, dtype=E4M3, device="cuda") for n in (64, 48))
        one = torch.empty(1, device="cuda")
        product = te_backend.gemm(a, one, b, one, None, torch.bfloat16)
    assert (product.shape, product.stride(), product.dtype) == ((64, 48), (48, 1), torch.bfloat16)

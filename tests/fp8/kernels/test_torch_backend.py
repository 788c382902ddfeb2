"""The torch backend casts and scales as TransformerEngine does, on every torch version and in any layout."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from thunder_memsave.config import Fp8Config
from thunder_memsave.fp8.compute.backends import require
from thunder_memsave.fp8.kernels import casting, cublas_gemm, tiled_product, torch_backend
from thunder_memsave.fp8.recipe import Recipe, RecipeName, Role, recipe_of
from thunder_memsave.fp8.scaling import GRAD, INPUT, WEIGHT, ScalingState
from thunder_memsave.settings.problems import ConfigError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF = float("nan"), float("inf")

# Exponents of 10 that the inputs of a step are multiplied with, and what one of their elements becomes.
STEPS: list[tuple[float, float | None]] = [
    *[(exponent, None) for exponent in (-2, -1, 0, 1, 2, 3)],  # growing
    *[(exponent, None) for exponent in (1, -1, -3, -5)],  # shrinking
    *[(0, value) for value in (NAN, None, INF, None, -INF, NAN)],
    *[(-INF, None), (-INF, NAN), (-38, None), (0, None)],  # zeros, and nearly so
]


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def part(name: str) -> Any:
    """Return a module of TransformerEngine, which tests with the fixture have."""
    return importlib.import_module(f"transformer_engine.{name}")


@dataclass(frozen=True)
class Linear:
    """A linear's tensors of one step."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    grad: Tensor


def linear(step: int, *, rows: int = 24, wide: int = 48, narrow: int = 32) -> Linear:
    exponent, value = STEPS[step]
    generator = torch.Generator().manual_seed(step)
    sizes = {"x": (rows, wide), "weight": (narrow, wide), "grad": (rows, narrow)}
    tensors = {
        name: (torch.randn(shape, generator=generator) * 10**exponent).bfloat16()
        for name, shape in sizes.items()
    }
    if value is not None:
        tensors["x"][3, 5] = tensors["grad"][1, 2] = value
    return Linear(**tensors, bias=torch.randn(narrow, generator=generator).bfloat16())


@dataclass(frozen=True)
class Results:
    """The results of a step of a linear; the fp8 tensors as bytes."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor


def backend_step(recipe: Recipe, state: ScalingState | None, given: Linear) -> Results:
    """Run forward and backward by the torch backend, as `symbols.py` does."""
    forward, backward = (None, None) if state is None else (state, state)

    def quantize(x: Tensor, role: Role) -> tuple[Tensor, Tensor]:
        dtype = recipe.dtype(role)
        if recipe.name == "block":
            height = torch_backend.BLOCK if role == "weight" else 1
            return torch_backend.quantize_block(x.contiguous(), dtype, height)
        if recipe.name == "current":
            return torch_backend.quantize_current(x, dtype)
        assert forward is not None
        assert backward is not None
        if role == "grad":
            scale, history = backward.backward_scale, backward.backward_amax_history
            return torch_backend.quantize_delayed(x, scale, history, GRAD, dtype, True)
        scale, history = forward.forward_scale, forward.forward_amax_history
        column = INPUT if role == "input" else WEIGHT
        return torch_backend.quantize_delayed(x, scale, history, column, dtype, True)

    def columns(x: Tensor, quantized: tuple[Tensor, Tensor], role: Role) -> tuple[Tensor, Tensor]:
        if recipe.name == "block":
            return quantize(x.t(), role)
        return torch_backend.transpose(quantized[0]), quantized[1]

    x, weight = quantize(given.x, "input"), quantize(given.weight, "weight")
    grad = quantize(given.grad, "grad")
    dtype = given.x.dtype
    return Results(
        output=torch_backend.gemm(*x, *weight, given.bias, dtype, True),
        grad_input=torch_backend.gemm(*grad, *columns(given.weight, weight, "weight"), None, dtype),
        grad_weight=torch_backend.gemm(
            *columns(given.grad, grad, "grad"), *columns(given.x, x, "input"), None, dtype
        ),
    )


class TransformerEngineLinear:
    """Run the same by TransformerEngine's own Python and its quantisers."""

    def __init__(self, recipe: Recipe) -> None:
        recipes = part("common.recipe")
        names = {
            "delayed": "DelayedScaling",
            "current": "Float8CurrentScaling",
            "block": "Float8BlockScaling",
        }
        options: dict[str, Any] = {"fp8_format": recipes.Format[recipe.fp8_format]}
        if recipe.name == "delayed":
            options |= {
                name: getattr(recipe, name)
                for name in ("margin", "amax_history_len", "amax_compute_algo")
            }
        self.recipe = getattr(recipes, names[recipe.name])(**options)
        self.forward, self.backward = (
            part("pytorch.quantization").RecipeState.create(
                self.recipe, mode=mode, num_quantizers=number
            )
            for mode, number in (("forward", 2), ("backward", 1))
        )
        self.input, self.weight = self.forward.make_quantizers()
        (self.grad,) = self.backward.make_quantizers()

    def step(self, given: Linear) -> Results:
        linear = part("pytorch.ops").BasicLinear
        with torch.no_grad():
            output, x, weight = linear._functional_forward(
                input=given.x,
                weight=given.weight,
                bias=given.bias,
                dtype=given.x.dtype,
                with_quantized_compute=True,
                input_quantizer=self.input,
                weight_quantizer=self.weight,
                output_quantizer=None,
            )
            grad_input, grad_weight = linear._functional_backward(
                grad_output=given.grad,
                input=x,
                weight=weight,
                with_quantized_compute=True,
                input_quantizer=self.input,
                weight_quantizer=self.weight,
                grad_output_quantizer=self.grad,
            )
        return Results(output=output, grad_input=grad_input, grad_weight=grad_weight)

    def update(self) -> None:
        schedule = part("pytorch.quantization")
        for state, is_forward in ((self.forward, True), (self.backward, False)):
            fp8_max = schedule.get_fp8_max(self.recipe, is_forward)
            schedule._amax_and_scale_update(state.amax_history, state.scale, fp8_max, self.recipe)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def assert_same_results(ours: Results, theirs: Results) -> None:
    for name in ("output", "grad_input", "grad_weight"):
        assert_same_bits(getattr(ours, name), getattr(theirs, name))


DELAYED = recipe_of(Fp8Config(amax_history_len=4))


@pytest.mark.parametrize(
    "recipe",
    [
        DELAYED,
        replace(DELAYED, margin=2, amax_compute_algo="most_recent"),
        replace(DELAYED, fp8_format="E4M3", amax_history_len=1),
    ],
    ids=["hybrid", "most_recent", "e4m3"],
)
def test_delayed_scaling_is_transformer_engines_over_20_steps_with_emulated_kernels(
    transformer_engine: ModuleType, recipe: Recipe
) -> None:
    state, reference = ScalingState(recipe), TransformerEngineLinear(recipe)
    assert len(STEPS) == 20
    seen = set()
    for step in range(len(STEPS)):
        given = linear(step)
        ours, theirs = backend_step(recipe, state, given), reference.step(given)
        assert_same_results(ours, theirs)
        for updates in ((), (state.update, reference.update)):
            for update in updates:
                update()
            assert_same_bits(state.forward_amax_history, reference.forward.amax_history)
            assert_same_bits(state.backward_amax_history, reference.backward.amax_history)
            assert_same_bits(state.forward_scale, reference.forward.scale)
            assert_same_bits(state.backward_scale, reference.backward.scale)
        seen.add(state.forward_scale[INPUT].item())
    assert len(seen) > 5  # scales moved


@pytest.mark.parametrize(
    ("name", "fp8_format"),
    [("current", None), ("current", "E4M3"), ("block", None), ("block", "HYBRID")],
)
def test_stateless_scaling_is_transformer_engines_with_emulated_kernels(
    transformer_engine: ModuleType, name: RecipeName, fp8_format: Any
) -> None:
    recipe = recipe_of(Fp8Config(recipe=name, fp8_format=fp8_format))
    reference = TransformerEngineLinear(recipe)
    for step in range(len(STEPS)):
        # Three blocks across, of which the last is not whole, and two down the weight.
        given = linear(step, rows=136, wide=272, narrow=144)
        ours, theirs = backend_step(recipe, None, given), reference.step(given)
        assert_same_results(ours, theirs)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_quantised_bytes_are_transformer_engines_with_emulated_kernels(
    transformer_engine: ModuleType, dtype: torch.dtype, of: torch.dtype, is_transposed: bool
) -> None:
    te_dtype = part("pytorch.constants").TE_DType[dtype]
    tensors = part("pytorch.tensor")
    for step in range(len(STEPS)):
        x = (linear(step, rows=136, wide=272).x.float() * 1.0001).to(of)
        x = x.t() if is_transposed else x
        scale, amax = torch.tensor([3.7]), torch.tensor([0.5])
        per_tensor = {"rowwise": True, "columnwise": False}
        theirs = tensors.Float8Quantizer(scale, amax, te_dtype, **per_tensor)(x.contiguous())
        history = torch.tensor([[9.0, 0.5], [1.0, 1.0]])
        scales = torch.tensor([1.0, 3.7])
        data, scale_inv = torch_backend.quantize_delayed(x, scales, history, 1, dtype, True)
        assert torch.equal(data.view(torch.uint8), theirs._data)
        assert torch.equal(scale_inv, theirs._scale_inv)
        assert torch.equal(history, torch.tensor([[9.0, amax.item()], [1.0, 1.0]]))

        for power_of_2 in (False, True):
            quantizer = tensors.Float8CurrentScalingQuantizer(
                te_dtype, device="cpu", force_pow_2_scales=power_of_2, **per_tensor
            )
            theirs = quantizer(x.contiguous())
            data, scale_inv = torch_backend.quantize_current(
                x, dtype, force_pow_2_scales=power_of_2
            )
            assert torch.equal(data.view(torch.uint8), theirs._data)
            assert torch.equal(scale_inv, theirs._scale_inv)

            for dims, height in ((1, 1), (2, 128)):
                quantizer = tensors.Float8BlockQuantizer(
                    te_dtype,
                    force_pow_2_scales=power_of_2,
                    block_scaling_dim=dims,
                    **per_tensor,
                )
                theirs = quantizer(x.contiguous())
                data, scale_inv = torch_backend.quantize_block(
                    x, dtype, height, force_pow_2_scales=power_of_2
                )
                assert torch.equal(data.view(torch.uint8), theirs._rowwise_data)
                laid_out = theirs._rowwise_scale_inv
                laid_out = laid_out.t() if height == 1 else laid_out
                down, across = scale_inv.shape
                assert torch.equal(scale_inv, laid_out[:down, :across])
                largest_loss = (torch_backend.dequantize(data, scale_inv) - x.float()).abs()
                assert largest_loss[x.isfinite()].max() <= x[x.isfinite()].abs().max() / 8


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_casts_saturate_and_keep_nan(dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([1e38, -1e38, INF, -INF, NAN, 0.0, -0.0, 1.0])
    data, _ = torch_backend.quantize_delayed(
        x, torch.ones(1), torch.zeros(1, 1), 0, dtype, records=False
    )
    expected = torch.tensor([largest, -largest, largest, -largest, NAN, 0.0, -0.0, 1.0])
    torch.testing.assert_close(data.float(), expected, rtol=0, atol=0, equal_nan=True)
    assert data.float()[6].signbit()


def test_amax_counts_infinities_and_drops_nan() -> None:
    assert torch_backend.amax(torch.tensor([1.0, -3.0, NAN])) == 3
    assert torch_backend.amax(torch.tensor([1.0, -INF, NAN])) == INF
    assert torch_backend.amax(torch.full((4,), NAN)) == 0
    assert torch_backend.amax(torch.empty(0, 16)) == 0


def test_an_amax_is_recorded_as_a_running_maximum_or_not_at_all() -> None:
    scale, history = torch.ones(2), torch.zeros(3, 2)
    for values in ([1.0, -5.0], [2.0], [5.0, 5.0]):
        x = torch.tensor([values])
        torch_backend.quantize_delayed(x, scale, history, 1, E4M3, records=True)
    torch_backend.quantize_delayed(torch.tensor([9.0]), scale, history, 1, E4M3, records=False)
    assert history.tolist() == [[0, 5], [0, 0], [0, 0]]


def test_the_factor_that_undoes_a_scale_is_no_view_of_the_state() -> None:
    scale = torch.tensor([1.0, 4.0])
    _, scale_inv = torch_backend.quantize_delayed(
        torch.ones(2, 2), scale, torch.zeros(1, 2), 1, E4M3, records=False
    )
    scale.fill_(0.5)
    assert scale_inv.tolist() == [0.25]


def test_a_block_of_zeros_has_scale_1_and_a_tiny_one_the_largest_power_of_2() -> None:
    x = torch.zeros(3, 128)
    x[1], x[2] = 1e-40, 3.0
    _, scale_inv = torch_backend.quantize_block(x, E4M3, 1)
    assert scale_inv.flatten().tolist() == [1.0, 2.0**-127, 2.0**-7]  # 448 / 3 is above 128


@pytest.mark.parametrize("height", [1, 128])
def test_no_chunk_of_a_large_tensor_changes_what_is_computed(
    monkeypatch: pytest.MonkeyPatch, height: int
) -> None:
    x = linear(2, rows=392, wide=160).x
    whole = [
        *torch_backend.quantize_block(x, E4M3, height),
        *torch_backend.quantize_current(x, E4M3),
    ]
    monkeypatch.setitem(casting._CAST_ELEMENTS, "cpu", 1000)
    parts = [
        *torch_backend.quantize_block(x, E4M3, height),
        *torch_backend.quantize_current(x, E4M3),
    ]
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_products_of_blocks_are_made_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    given = linear(2, rows=392, wide=160, narrow=272)
    x = torch_backend.quantize_block(given.x, E4M3, 1)
    weight = torch_backend.quantize_block(given.weight, E4M3, 128)
    whole = torch_backend.gemm(*x, *weight, given.bias, torch.float32)
    expected = torch_backend.dequantize(*x) @ torch_backend.dequantize(*weight).t() + given.bias
    assert torch.equal(whole, expected)
    monkeypatch.setattr(tiled_product, "_CHUNK_ELEMENTS", 1000)
    parts = torch_backend.gemm(*x, *weight, given.bias, torch.float32)
    # A product of other sizes may add up in another order.
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_plan_for_an_absent_device_sees_one_product(recipe: str) -> None:
    """What a CPU does instead, casts and float32 products in tiles, is no cost of a GPU's tensor cores."""
    with FakeTensorMode():
        x, weight = torch.empty(64, 256), torch.empty(128, 256)
        if recipe == "current":
            operands = [torch_backend.quantize_current(t, E4M3) for t in (x, weight)]
        else:
            operands = [
                torch_backend.quantize_block(t, E4M3, height)
                for t, height in ((x, 1), (weight, 128))
            ]
        with FlopCounterMode(display=False) as counter, Operators() as seen:
            product = torch_backend.gemm(*operands[0], *operands[1], None, torch.bfloat16)
    assert (product.shape, product.dtype) == ((64, 128), torch.bfloat16)
    assert counter.get_total_flops() == 2 * 64 * 128 * 256
    assert seen.names.count("aten._scaled_mm.default") == 1
    assert not {name for name in seen.names if "mul" in name or "to_copy" in name}


def test_nothing_is_cast_where_there_are_no_rows() -> None:
    x = torch.empty(0, 32)
    for data, scale_inv in (
        torch_backend.quantize_current(x, E4M3),
        torch_backend.quantize_delayed(x, torch.ones(1), torch.zeros(2, 1), 0, E4M3, records=True),
    ):
        assert (data.shape, data.dtype, scale_inv.tolist()) == ((0, 32), E4M3, [1.0])


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_what_cuda_wants_of_a_product_does_not_change_it(out_dtype: torch.dtype) -> None:
    given = linear(2, rows=24, wide=40)  # 40 is no multiple of 16
    x, weight = (torch_backend.quantize_current(t, E4M3) for t in (given.x, given.weight))
    plain = torch_backend.gemm(*x, *weight, given.bias, out_dtype)
    padded = cublas_gemm.cuda_gemm(*x, *weight, given.bias.to(out_dtype), out_dtype, True)
    # Zeros may join the sums in another order.
    torch.testing.assert_close(plain, padded, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("height", [1, 128])
@pytest.mark.parametrize("wide", [208, 512])
def test_scales_of_blocks_are_laid_out_as_torch_checks_them_on_cuda(
    height: int, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def multiply(a: Tensor, b: Tensor, **given: Any) -> Tensor:
        seen.update(given)  # on meta, torch 2.13 expects the floor of a number of blocks
        return a.new_empty(a.shape[0], b.shape[1], dtype=given["output_dtype"])

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", multiply)
    down, across = torch_backend.block_scales_shape(144, wide, height)
    x, weight = (torch.empty(rows, wide, dtype=E4M3, device="meta") for rows in (24, 144))
    x_scale_inv = torch.empty(torch_backend.block_scales_shape(24, wide, 1), device="meta")
    weight_scale_inv = torch.empty(down, across, device="meta")
    product = cublas_gemm.cuda_gemm(
        x, x_scale_inv, weight, weight_scale_inv, None, torch.bfloat16, False
    )
    assert (product.shape, product.dtype) == ((24, 144), torch.bfloat16)
    kinds, scales = torch.nn.functional.ScalingType, seen["scale_a"]
    assert seen["scale_recipe_a"] is kinds.BlockWise1x128
    assert (scales.shape, scales.stride()) == ((24, across), (1, 24))
    scales = seen["scale_b"]
    if height == 1:
        assert seen["scale_recipe_b"] is kinds.BlockWise1x128
        assert (scales.shape, scales.stride()) == ((144, across), (1, 144))
    else:  # rows of 2 or 4 scales become 4
        assert seen["scale_recipe_b"] is kinds.BlockWise128x128
        assert (scales.shape, scales.stride()) == ((4, 2), (1, 4))


def test_rows_that_cuda_would_refuse_are_made_whole() -> None:
    x, weight = (torch.empty(rows, 40, dtype=E4M3, device="meta") for rows in (24, 144))
    scale_inv = torch.empty(1, device="meta")
    product = cublas_gemm.cuda_gemm(
        x, scale_inv, weight, scale_inv, None, torch.bfloat16, use_fast_accum=True
    )
    assert product.shape == (24, 144)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        torch._scaled_mm(x, weight.t(), scale_inv, scale_inv, out_dtype=torch.bfloat16)


class Chip:
    """A CUDA device that does not exist."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], cuda: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.version, "cuda", cuda)


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "capability", "cuda", "recipe", "message"),
    [
        (
            "NVIDIA A100",
            (8, 0),
            "13.0",
            "current",
            r"fp8.backend is torch and fp8.recipe is current, but torch._scaled_mm needs compute capability 8\.9 "
            r"\(Ada, Hopper or later\), and there is NVIDIA A100 \(compute capability 8\.0, with CUDA 13\.0\): leave "
            r"out `fp8`\.",
        ),
        (
            "NVIDIA L4",
            (8, 9),
            "13.0",
            "block",
            r"such blocks on compute capability 9\.0 \(Hopper\), from CUDA 12\.9 on, and there is NVIDIA L4 \(compute "
            r"capability 8\.9, with CUDA 13\.0\): set `fp8.recipe: current`",
        ),
        ("NVIDIA H100", (9, 0), "12.8", "block", r"from CUDA 12\.9 on, .* with CUDA 12\.8\)"),
        (
            "NVIDIA H100",
            (9, 0),
            "13.0",
            "mxfp8",
            r"mxfp8 needs compute capability 10\.0 \(Blackwell\), and there is NVIDIA H100 \(compute capability 9\.0, "
            r"with CUDA 13\.0\): set `fp8.recipe` to delayed, current or block\.",
        ),
        (
            "NVIDIA B200",
            (10, 0),
            "13.0",
            "nvfp4",
            r"TransformerEngine alone multiplies in nvfp4 on CUDA devices: `pip install 'thunder-memsave\[te\]'` and "
            r"set `fp8\.backend: transformer_engine`, or set `fp8\.recipe: current`\.$",
        ),
        (
            "NVIDIA H100",
            (9, 0),
            "13.0",
            "nvfp4",
            r"nvfp4 needs compute capability 10\.0 \(Blackwell\), and there is NVIDIA H100 \(compute capability 9\.0, "
            r"with CUDA 13\.0\): set `fp8.recipe` to delayed, current or block\.$",
        ),
        (
            "NVIDIA B200",
            (10, 0),
            "13.0",
            "mxfp8",
            r"TransformerEngine alone multiplies in mxfp8 on CUDA devices: `pip install 'thunder-memsave\[te\]'` and "
            r"set `fp8\.backend: transformer_engine`, or set `fp8\.recipe: current`\.$",
        ),
        (
            "RTX PRO 6000",
            (12, 0),
            "13.0",
            "mxfp8",
            r"TransformerEngine computes mxfp8 on compute capability 10\.0 and others below 12\.0, and there is RTX "
            r"PRO 6000 \(compute capability 12\.0, with CUDA 13\.0\): set `fp8\.recipe: current`\.$",
        ),
        (
            "RTX PRO 6000",
            (12, 0),
            "13.0",
            "nvfp4",
            r"nvfp4 needs the instructions of compute capability 10\.x \(Blackwell\) that round stochastically, and "
            r"there is RTX PRO 6000 \(compute capability 12\.0, with CUDA 13\.0\): set `fp8\.recipe: current`\.$",
        ),
        ("NVIDIA B200", (10, 0), "13.0", "block", r"on compute capability 9\.0 \(Hopper\)"),
    ],
)
def test_a_chip_that_cannot_compute_a_recipe_is_named(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: tuple[int, int],
    cuda: str,
    recipe: RecipeName,
    message: str,
) -> None:
    Chip(monkeypatch, name, capability, cuda)
    with pytest.raises(ConfigError, match=message):
        require("torch", recipe, CUDA)


@pytest.mark.parametrize(
    ("capability", "recipe"),
    [((8, 9), "delayed"), ((8, 9), "current"), ((9, 0), "block"), ((10, 0), "current")],
)
def test_a_chip_that_can_is_taken(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], recipe: RecipeName
) -> None:
    Chip(monkeypatch, "a chip", capability, "12.9")
    require("torch", recipe, CUDA)


def test_the_cpu_computes_all_recipes() -> None:
    for recipe in get_args(RecipeName):
        require("torch", recipe, CPU)
    with pytest.raises(ConfigError, match="CUDA devices and on the CPU, and the model is on mps"):
        require("torch", "current", torch.device("mps"))

"""The loss of a linear layer in fp8 in tiles: the numbers of whole casts and products, for all options of the loss."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.fp8.kernels import torch_backend
from thunder_memsave.ops.families.linear_cross_entropy_in_fp8 import (
    Settings,
    backward,
    forward,
    fp8_tile_rows,
)
from thunder_memsave.ops.families.tiled_fp8_loss import Scaling
from thunder_memsave.ops.families.tiled_loss import IGNORED, TILE_BYTES

TOKENS, WIDTH, CLASSES = 300, 32, 64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("delayed", "current", "block", "mxfp8")
SCALINGS: dict[str, Scaling] = {"block": "block", "mxfp8": "mx"}
PLAIN: dict[str, Any] = {}
ALL = {"label_smoothing": 0.1, "soft_cap": 5.0, "logit_scale": 0.5}
EVERY_OPERAND = (True, True, True)
Pair = tuple[Tensor, Tensor]


def settings(reduction: str, options: dict[str, Any]) -> Settings:
    of: dict[str, Any] = {
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "soft_cap": None,
        "logit_scale": 1.0,
    }
    return Settings(
        reduction=reduction,  # type: ignore[arg-type]
        **{**of, **options},
        dtype=torch.float32,
        use_fast_accum=False,
        kernels=torch_backend.__name__,
    )


class Case:
    """Operands of a recipe, cast whole."""

    def __init__(self, recipe: str, ignored: float) -> None:
        torch.manual_seed(0)
        self.recipe = recipe
        self.x, self.weight = torch.randn(TOKENS, WIDTH), torch.randn(CLASSES, WIDTH)
        self.bias = torch.randn(CLASSES)
        self.targets = torch.randint(0, CLASSES, (TOKENS,))
        self.targets[torch.rand(TOKENS) < ignored] = IGNORED
        self.hidden, self.quantized_weight = self.cast(self.x, E4M3), self.cast_weight()
        transposed = self.quantized_weight[0].t().contiguous()
        scale = self.quantized_weight[1]
        self.transposed = transposed, scale.t().contiguous() if scale.ndim > 1 else scale
        if recipe == "mxfp8":
            self.transposed = torch_backend.quantize_mx_columns(self.weight, E4M3)
        self.scale = torch.tensor([200.0]) if recipe == "delayed" else None
        self.history = torch.zeros(2, 1) if recipe == "delayed" else None

    def cast(self, x: Tensor, dtype: torch.dtype) -> Pair:
        if self.recipe == "mxfp8":
            return torch_backend.quantize_mx(x, dtype)
        if self.recipe == "block":
            return torch_backend.quantize_block(x, dtype, 1)
        return torch_backend.quantize_current(x, dtype)

    def cast_weight(self) -> Pair:
        if self.recipe == "mxfp8":
            return torch_backend.quantize_mx(self.weight, E4M3)
        if self.recipe == "block":
            return torch_backend.quantize_block(self.weight, E4M3, 128)
        return torch_backend.quantize_current(self.weight, E4M3)

    @property
    def grad_dtype(self) -> torch.dtype:
        return E4M3 if self.recipe in SCALINGS else E5M2

    def cast_gradient(self, grad: Tensor) -> Pair:
        if self.scale is None:
            return self.cast(grad, self.grad_dtype)
        return torch_backend.cast(grad, self.scale, self.grad_dtype), self.scale.reciprocal()

    def whole(self, of: Settings) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return the loss, its gradients, and the largest gradient of a logit."""
        made = torch_backend.gemm(*self.hidden, *self.quantized_weight, self.bias, torch.float32)
        logits = made.requires_grad_()
        values = logits * of.logit_scale
        if of.soft_cap is not None:
            values = of.soft_cap * torch.tanh(values / of.soft_cap)
        loss = F.cross_entropy(
            values, self.targets, reduction=of.reduction, label_smoothing=of.label_smoothing
        )
        (grad,) = torch.autograd.grad(loss, logits, cotangent_of(loss))
        quantized = self.cast_gradient(grad)
        of_hidden = torch_backend.gemm(*quantized, *self.transposed, None, torch.float32)
        if self.recipe == "mxfp8":
            both = (grad, self.x)
            columns = tuple(torch_backend.quantize_mx_columns(t, E4M3) for t in both)
        elif self.recipe == "block":
            columns = (
                self.cast_gradient(grad.t().contiguous()),
                self.cast(self.x.t().contiguous(), E4M3),
            )
        else:
            pairs = (quantized, self.hidden)
            columns = tuple((q.t().contiguous(), scale) for q, scale in pairs)
        of_weight = torch_backend.gemm(*columns[0], *columns[1], None, torch.float32)
        return loss.detach(), [of_hidden, of_weight, grad.sum(0)], grad.abs().max()

    def in_tiles(
        self,
        of: Settings,
        rows: int,
        *,
        num_kept: Tensor | None = None,
        wanted: tuple[bool, ...] = EVERY_OPERAND,
    ) -> tuple[Tensor, list[Tensor]]:
        of_logits = (*self.hidden, *self.quantized_weight, self.bias)
        of_loss = (self.targets, num_kept, *of, rows)
        loss = forward.run(*of_logits, *of_loss)
        scaling = SCALINGS.get(self.recipe, "tensor")
        whole = self.x if scaling != "tensor" and wanted[1] else None
        of_cast = (whole, *self.transposed, self.scale, self.history)
        of_gradients = (scaling, self.grad_dtype, self.scale is not None, wanted)
        found = backward.run(cotangent_of(loss), *of_logits, *of_cast, *of_gradients, *of_loss)
        return loss, list(found) if isinstance(found, tuple) else [found]


def cotangent_of(loss: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, loss.numel()).reshape(loss.shape)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_loss_and_gradients_are_those_of_whole_casts(recipe: str, options: dict[str, Any]) -> None:
    for reduction, ignored, rows in product(
        ("mean", "sum", "none"), (0.0, 0.3), (50, 128, 256, TOKENS)
    ):
        case, of = Case(recipe, ignored), settings(reduction, options)
        loss, found = case.in_tiles(of, rows)
        expected, gradients, amax = case.whole(of)
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=1e-6)
        # A number that differs in its last bit may be cast to the next one of fp8: here none does without options.
        most = 2e-6 if not options else 1e-3
        errors = list(map(error, found, gradients))
        assert max(errors) < most, (reduction, ignored, rows, errors)
        if case.history is not None:
            torch.testing.assert_close(case.history[0, 0], amax, rtol=1e-6, atol=0.0)
            assert not case.history[1:].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_hidden_states_have_the_same_bits_in_tiles_of_any_size(recipe: str) -> None:
    case, of = Case(recipe, 0.3), settings("mean", PLAIN)
    expected = case.in_tiles(of, TOKENS)[1]
    for rows in (50, 128, 256):
        found = case.in_tiles(of, rows)[1]
        assert torch.equal(found[0], expected[0])
        assert error(found[1], expected[1]) < 1e-6


@pytest.mark.parametrize("recipe", RECIPES)
def test_where_no_token_has_a_loss_there_are_no_gradients(recipe: str) -> None:
    case = Case(recipe, 2.0)
    loss, found = case.in_tiles(settings("sum", PLAIN), 50)
    assert loss == 0.0
    assert not any(gradient.any() for gradient in found)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_only_what_is_wanted_is_computed(recipe: str, wanted: tuple[bool, ...]) -> None:
    case, of = Case(recipe, 0.0), settings("mean", PLAIN)
    every = case.in_tiles(of, TOKENS)[1]
    with AtenRecord() as record:
        (found,) = case.in_tiles(of, TOKENS, wanted=wanted)[1]
    assert torch.equal(found, every[wanted.index(True)])
    is_padded = recipe == "mxfp8" and wanted[1]  # to whole blocks along the tokens
    num_tokens = 2 * TOKENS + (320 if is_padded else TOKENS)  # the logits twice, and one gradient
    assert record.flops == 2 * num_tokens * WIDTH * CLASSES


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_token_that_is_ignored_costs_nothing(recipe: str) -> None:
    flops = {}
    for num_ignored, is_counted in product((0, 100, TOKENS), (False, True)):
        case = Case(recipe, 0.0)
        case.targets[:num_ignored] = IGNORED
        kept = torch.tensor(TOKENS - num_ignored) if is_counted else None
        with AtenRecord() as record:
            case.in_tiles(settings("mean", PLAIN), 50, num_kept=kept)
        flops[num_ignored, is_counted] = record.flops
    for is_counted in (False, True):
        assert flops[100, is_counted] * TOKENS == flops[0, is_counted] * (TOKENS - 100)
        assert flops[TOKENS, is_counted] == 0


def test_an_unknown_target_is_refused_as_by_pytorch() -> None:
    case = Case("current", 0.0)
    case.targets[3] = CLASSES
    with pytest.raises(IndexError, match="Target 64 is out of bounds: there are 64 classes"):
        case.in_tiles(settings("mean", PLAIN), 50)


@pytest.mark.parametrize("scaling", ["tensor", "block", "mx"])
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_a_tile_has_a_bound_and_whole_blocks(options: dict[str, Any], scaling: Scaling) -> None:
    of = settings("mean", options)
    num_bytes = 4 + 4 * (of.soft_cap is not None) + 2 + 4 * (scaling == "block")
    for num_tokens, num_classes in product((1, 100, 2048, 10**5), (10, 32_000, 128_256)):
        rows = fp8_tile_rows(num_tokens, num_classes, of, scaling=scaling, width=0)
        has_blocks = scaling != "tensor"
        least = 128 if has_blocks else 1
        assert rows <= max(least, TILE_BYTES // (num_bytes * num_classes))
        assert rows == num_tokens or not has_blocks or rows % 128 == 0

"""Functions, layers and operators of torch and of users have eager's bits, and draw eager's random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.memory import measured_peak_bytes
from harness.parity import Twins, weighted_sum
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError, CompileError
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Plan

Function = Callable[..., Any]


class Applies(nn.Module):
    """A function of parameters, times a number: what comes in is not a leaf, and gradients go through."""

    def __init__(self, function: Function, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.operands = nn.ParameterList(nn.Parameter(torch.randn(s)) for s in shapes)

    def forward(self) -> Any:
        return self.function(*(p * 1.5 for p in self.operands))


def _rotated(x: Tensor) -> Tensor:
    turn = torch.polar(torch.ones(4), torch.arange(4.0))
    return torch.view_as_real(torch.view_as_complex(x.view(4, 4, 2)) * turn).flatten(1)


def _pooled(x: Tensor) -> Tensor:
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, indices, [2, 2])


def _in_place(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).index_add_(0, torch.tensor([0, 2, 1, 0]), y)


def _experts(x: Tensor, w: Tensor) -> Tensor:
    ends = torch.tensor([4, 8, 16], dtype=torch.int32)
    return F.grouped_mm(x.bfloat16(), w.bfloat16(), offs=ends)


def _weight_norm(v: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight has other strides than the weight, which its kernel takes for granted."""
    weight = torch._weight_norm(v, g, 0)
    return (weight.permute(2, 0, 1) @ x[0]).permute(1, 2, 0)


def _shared(x: Tensor) -> Tensor:
    """The same operand twice, a result that is a view, and one that nothing reads."""
    windows = x.unfold(1, 2, 1)
    _, values, _ = torch.linalg.svd(torch.cdist(x, x.flip(0)))
    return windows.sum(-1)[:, :4] + values


MATRIX, IMAGE, IMAGES = (4, 8), (1, 2, 4, 4), (2, 4, 6, 6)
LAYERS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding="same"), ((2, 4, 6), (6, 4, 3), (6,))),
    "conv2d": (
        lambda x, w: F.conv2d(x, w, stride=2, dilation=2, groups=2),
        (IMAGES, (6, 2, 2, 2)),
    ),
    "depthwise": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), (IMAGES, (4, 1, 3, 3))),
    "conv3d": (lambda x, w: F.conv3d(x[None], w), (IMAGES, (3, 2, 2, 2, 2))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (IMAGES, (4, 3, 2, 2))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGES,)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (IMAGES,)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x[0], 2), (IMAGES,)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (1, 1)), (IMAGES,)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x[0], 4), (IMAGES,)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), (IMAGES,)),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        (IMAGES, (4,), (4,)),
    ),
    "group_norm_of_images": (lambda x, w, b: F.group_norm(x, 2, w, b), (IMAGES, (4,), (4,))),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), (IMAGES, (4,))),
    "prelu": (F.prelu, (IMAGES, (4,))),
    **{
        f.__name__: (f, (MATRIX,))
        for f in (
            *(F.hardswish, F.hardsigmoid, F.hardtanh, F.relu6, F.leaky_relu, F.elu, F.selu),
            *(F.celu, F.mish, F.softplus, F.logsigmoid, F.softshrink, F.hardshrink),
        )
    },
}
FUNCTIONS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "flip": (lambda x: x.flip(1).roll(1, 0), (MATRIX,)),
    "scan": (lambda x: torch.cumsum(x, 0)[1:] * torch.repeat_interleave(x[:1], 3, 0), (MATRIX,)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), (MATRIX,)),
    "complex": (_rotated, (MATRIX,)),
    "conjugate": (lambda x: torch.complex(x, x * 2).conj()[1:].abs(), (MATRIX,)),
    "fft": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 0.5), (MATRIX,)),
    "in_place": (_in_place, (MATRIX, MATRIX)),
    "scatter": (
        lambda x, y: x.scatter_reduce(0, torch.zeros(4, 8, dtype=torch.long), y, "amax"),
        (MATRIX, MATRIX),
    ),
    "list": (lambda x, y: torch.hstack([x, y * 2]), (MATRIX, MATRIX)),
    "keywords": (lambda x: F.cosine_similarity(x1=x, x2=x * 2), (MATRIX,)),
    "values_put": (
        lambda x: torch.zeros(4).index_put((torch.tensor([1]),), x[0, :1]),
        (MATRIX,),
    ),
    "values_added": (
        lambda x: torch.zeros(5, 8).index_put_((torch.tensor([0, 2, 2, 4]),), x, accumulate=True),
        (MATRIX,),
    ),
    "turned": (lambda x: (x * 1j / (2 + 1j)).abs(), (MATRIX,)),
    "infinities": (
        lambda x: torch.ops.aten.masked_fill(x, x > 0, float("-inf")).softmax(1),
        (MATRIX,),
    ),
    "shared": (_shared, (MATRIX,)),
    "pooled": (_pooled, (IMAGE,)),
    "resized": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (IMAGE,)),
    "sampled": (lambda x, g: F.grid_sample(x, g, align_corners=False), (IMAGE, (1, 3, 3, 2))),
    "unfolded": (lambda x: F.fold(F.unfold(x, 2) * 2, (4, 4), 2), (IMAGE,)),
    "solved": (torch.linalg.solve, ((4, 4), (4, 2))),
    "bilinear": (F.bilinear, ((4, 8), (4, 7), (5, 8, 7), (5,))),
    "experts": (_experts, ((16, 16), (3, 16, 32))),
    "memory": (lambda x: torch.diagonal(x).as_strided((2, 2), (9, 18)) * x[0, 0], (MATRIX,)),
    "nll_loss": (
        lambda x: F.nll_loss(x.log_softmax(1).view(-1, 8), torch.tensor([1, -100, 0, 7])),
        (MATRIX,),
    ),
    "group_norm": (
        lambda x, w, b: F.group_norm(x.sin(), 2, w, b).transpose(1, 2).flatten(2).sin(),
        (IMAGE, (2,), (2,)),
    ),
    "group_norm_of_turned": (
        lambda x, w, b: F.group_norm(x.transpose(2, 3) * 2, 2, w, b).sin(),
        (IMAGE, (2,), (2,)),
    ),
    "weight_norm": (_weight_norm, ((6, 4, 3), (6, 1, 1), (2, 4, 8))),
    "distances": (lambda x, y: torch.cdist(x.t(), y.t()).t(), (MATRIX, MATRIX)),
    "renorm": (lambda x: torch.ops.aten.renorm(x, 2, 0, 1.0), (MATRIX,)),
    **LAYERS,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_bits_of_eager(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    twins = Twins(Applies(function, *shapes))
    ours = twins.assert_equal(loss=weighted_sum, rtol=0.0, atol=0.0)
    assert ours.stride() == twins.eager().stride()


class Layers(nn.Module):
    """All of `LAYERS` in one model, each of parameters of its own, times numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.ModuleDict(
            {
                name: nn.ParameterList(torch.randn(s, dtype=dtype) * 3 for s in shapes)
                for name, (_, shapes) in LAYERS.items()
            }
        )

    def forward(self) -> Tensor:
        found = []
        for name, values in self.values.items():
            assert isinstance(values, nn.ParameterList)
            y = LAYERS[name][0](*values)
            found.append((y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape)).flatten())
        return torch.cat(found)


def test_they_have_the_bits_of_eager_in_bfloat16() -> None:
    Twins(Layers(torch.bfloat16)).assert_equal(loss=weighted_sum, rtol=0.0, atol=0.0)


class Loss(nn.Module):
    """The sum of all losses of cross entropy: each reduction, with weights, smoothed."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("weight", torch.arange(1.0, 5.0))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.linear(x).movedim(-1, min(1, x.ndim - 1))
        losses = [
            F.cross_entropy(logits, target, weight, reduction=reduction, label_smoothing=smoothing)
            for reduction in ("mean", "sum", "none")
            for weight in (None, self.weight)
            for smoothing in (0.0, 0.1)
        ]
        return torch.cat([weighted_sum(loss)[None] for loss in losses])


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ((4,), torch.tensor(2)),
        ((3, 4), torch.tensor([0, -100, 3])),
        ((2, 3, 4), torch.tensor([[0, -100, 3], [1, 1, -100]])),
    ],
    ids=["class", "rows", "more dims"],
)
def test_cross_entropy_with_ignored_rows_has_the_bits_of_eager(
    shape: tuple[int, ...], target: Tensor
) -> None:
    Twins(Loss()).assert_equal(torch.randn(shape), target, loss=weighted_sum, rtol=0.0, atol=0.0)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.no_bias = nn.LayerNorm(12), nn.LayerNorm(12, bias=False)
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.no_bias(F.gelu(self.both(x)))


def test_layer_norms_of_no_rows_have_the_bits_of_eager() -> None:
    Twins(Norms()).assert_equal(torch.randn(0, 12), loss=weighted_sum, rtol=0.0, atol=0.0)


def test_layer_norms_with_frozen_parameters_have_the_bits_of_eager() -> None:
    twins = Twins(Norms())
    twins.change(lambda m: m.both.requires_grad_(False))
    x = torch.randn(5, 12, requires_grad=True)
    twins.assert_equal(x, loss=weighted_sum, rtol=0.0, atol=0.0)
    backward = twins.compiled.captures[-1].backward_traces[-1].bound_symbols
    (first, last) = (b for b in backward if b.sym.name == "aten_native_layer_norm_backward")
    assert [a for a in first.args if isinstance(a, list)][-1] == [True, True, False]
    assert [a for a in last.args if isinstance(a, list)][-1] == [True, False, False]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout2d(x * 2, 0.4, inplace=True),
        lambda x: F.dropout3d(x[None] * 2, 0.4, True, True),
        lambda x: F.alpha_dropout(x * 2, 0.4, True, True),
        lambda x: F.feature_alpha_dropout(x * 2, 0.4, True, True),
        lambda x: nn.RReLU(inplace=True)(x * 2),
        lambda x: F.rrelu(x, training=True),
        lambda x: x + torch.empty_like(x).exponential_(2.0),
    ],
    ids=["dropout2d", "dropout3d", "alpha", "feature_alpha", "rrelu_", "rrelu", "exponential"],
)
def test_what_is_drawn_is_what_eager_draws_also_in_place(function: Function) -> None:
    twins = Twins(Applies(function, IMAGE))
    found = []
    for model, run in ((twins.model, twins.compiled), (twins.eager, twins.eager)):
        torch.manual_seed(0)
        result = run()
        result.square().sum().backward()
        (parameter,) = model.parameters()
        found.append([result.detach(), parameter.grad, torch.get_rng_state()])
    assert all(map(torch.equal, *found))


class Layer(nn.Module):
    """A layer of torch's, whose first result counts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.x = layer, nn.Parameter(torch.randn(5, 2, 8))

    def forward(self) -> Tensor:
        result = self.layer(self.x * 1.5)
        return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(8, 6, num_layers=2, bidirectional=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)),
    ],
    ids=["LSTM", "encoder", "weight_norm"],
)
def test_layers_have_the_bits_of_eager(layer: nn.Module) -> None:
    Twins(Layer(layer)).assert_equal(loss=weighted_sum, rtol=0.0, atol=0.0)


def test_a_layer_that_eager_computes_in_place_has_the_numbers_of_eager() -> None:
    # Eager rounds in another vectorized loop, because it computes in memory with gaps.
    Twins(Layer(nn.GRU(8, 16))).assert_equal(loss=weighted_sum)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[torch.tensor([True, False, True, True])],
        lambda x: x.masked_select(x > 0).sum(),
        lambda x: torch.ones(4, 8).nonzero() * x.sum(),
    ],
    ids=["boolean index", "masked_select", "nonzero"],
)
def test_shapes_that_depend_on_numbers_are_refused_with_file_and_line(function: Function) -> None:
    with pytest.raises(
        CompileError, match=r"test_functions\.py:\d+ .*shape of its result depends on numbers"
    ):
        CompiledModule(Applies(function, MATRIX))()


class Drawn(nn.Module):
    """Random and complex values, and a scan."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        drawn = F.gumbel_softmax(hidden, tau=0.5) + F.dropout1d(hidden.cumsum(0), 0.3)
        rotated = torch.view_as_complex(self.second(drawn).unflatten(-1, (8, 2)))
        return torch.view_as_real(rotated * rotated).square().mean()


class Stepped:
    """A planned model after a step, with what it computed: loss, gradients, and the generator's state."""

    def __init__(self, budget_bytes: int | None) -> None:
        torch.manual_seed(0)
        self.model, self.x = Drawn(), torch.randn(64, 16)
        memory = MemoryConfig(policy="keep_all" if budget_bytes is None else "plan")
        self.planner = MemoryPlanner(memory, device=device("cpu"), budget_bytes=budget_bytes)
        self.compiled = CompiledModule(self.model, planner=self.planner)
        self.computed = [*self.step(), torch.get_rng_state()]

    def step(self) -> list[Tensor]:
        torch.manual_seed(1)
        loss = self.compiled(self.x)
        loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return [loss.detach(), *gradients]

    @property
    def plan(self) -> Plan:
        plan = self.planner.calls[-1].plan
        assert plan is not None
        return plan

    @property
    def predicted_bytes(self) -> int:
        call = self.planner.calls[-1]
        held_bytes = sum(call.program.storages[s].nbytes for s in call.program.held)
        return call.profile.peak_bytes - held_bytes - call.memory.other_bytes


def test_random_functions_draw_the_numbers_of_eager() -> None:
    torch.manual_seed(0)
    eager, x = Drawn(), torch.randn(64, 16)
    torch.manual_seed(1)
    loss = eager(x)
    loss.backward()
    gradients = [p.grad for p in eager.parameters() if p.grad is not None]
    expected = [loss.detach(), *gradients, torch.get_rng_state()]
    assert len(gradients) == 4
    assert all(map(torch.equal, Stepped(None).computed, expected))


def test_every_budget_gives_the_bits_of_keeping_all_in_the_bytes_that_were_predicted() -> None:
    kept = Stepped(None)
    with pytest.raises(BudgetError) as error:
        Stepped(1)
    smallest_bytes = error.value.smallest_bytes
    assert smallest_bytes is not None
    largest_bytes = kept.plan.predicted_peak_bytes
    for budget_bytes in (smallest_bytes, (smallest_bytes + largest_bytes) // 2):
        planned = Stepped(budget_bytes)
        plan = planned.plan
        assert plan.recompute_us > 0
        assert plan.predicted_peak_bytes <= budget_bytes < largest_bytes
        assert all(map(torch.equal, planned.computed, kept.computed))
        assert measured_peak_bytes(planned.step) == planned.predicted_bytes


@torch.library.custom_op("thunder_memsave_tests::scaled_cube", mutates_args=())
def scaled_cube(x: Tensor, scale: float) -> Tensor:
    return x * x * x * scale


@scaled_cube.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    x, ctx.scale = inputs
    ctx.save_for_backward(x)


def _sevenfold(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * x * x * 7 * ctx.scale, None  # not the derivative, to see that it is what runs


scaled_cube.register_autograd(_sevenfold, setup_context=_save)


def test_a_custom_operator_runs_with_its_own_derivative() -> None:
    twins = Twins(Applies(lambda x: scaled_cube(x, 0.5), MATRIX))
    twins.assert_equal(loss=weighted_sum, rtol=0.0, atol=0.0)
    names = [b.sym.name for b in twins.compiled.captures[0].forward_traces[-1].bound_symbols]
    assert "thunder_memsave_tests_scaled_cube" in names

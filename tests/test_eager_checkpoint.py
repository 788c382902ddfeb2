"""`checkpoint` for eager code gives the gradients of a plain call, bit by bit, and keeps nothing for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError

import thunder_memsave
from harness.memory import measured_peak_bytes
from thunder_memsave import checkpoint
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.frontend.calls import Call as CapturedCall
from thunder_memsave.frontend.capture import capture

Call = Callable[..., Any]
WIDTH = 6


def plainly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


class Block(nn.Module):
    """Counts how often it begins and ends."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout
        self.num_begun = self.num_ended = 0

    def forward(self, x: Tensor, *, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
        self.num_begun += 1
        y = F.dropout(torch.tanh(self.up(x) * scale), self.dropout)
        y = self.down(y)
        self.num_ended += 1
        return y if shift is None else y + shift * y


def blocks(num: int = 3, **options: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(**options) for _ in range(num))


def sample(seed: int = 1, **options: Any) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed), **options)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def assert_same(run: Callable[[Call], list[Tensor]]) -> None:
    """Compare a call with `checkpoint` and one without, and the random numbers drawn next."""
    results = []
    for call in (plainly, checkpoint):
        torch.manual_seed(3)
        results.append([*run(call), torch.rand(4)])
    assert len(results[0]) == len(results[1]) > 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def chain(call: Call, layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = call(layer, x)
    return x


def test_gradients_and_random_numbers_are_those_of_a_plain_call() -> None:
    def run(call: Call) -> list[Tensor]:
        layers = blocks(dropout=0.5)
        chain(call, layers, sample(requires_grad=True)).square().sum().backward()
        return gradients(layers)

    assert_same(run)


def test_no_argument_needs_a_gradient() -> None:
    def run(call: Call) -> list[Tensor]:
        layers = blocks(1)
        call(layers[0], sample()).sum().backward()
        return gradients(layers)

    assert_same(run)


def test_a_function_without_arguments() -> None:
    def run(call: Call) -> list[Tensor]:
        layers, x = blocks(1, dropout=0.5), sample()
        call(lambda: layers[0](x)).sum().backward()
        return gradients(layers)

    assert_same(run)


def test_keyword_arguments_other_values_and_outputs_of_any_structure() -> None:
    def several(x: Tensor, *, by: dict[str, Any], use_reentrant: str) -> dict[str, Any]:
        assert use_reentrant == "mine"
        return {"sum": [x + by["shift"], (x * by["factor"]).tanh()], "name": use_reentrant}

    def run(call: Call) -> list[Tensor]:
        x, shift = sample(requires_grad=True), sample(2, requires_grad=True)
        by = {"shift": shift.exp(), "factor": 0.5}
        result = call(several, x, by=by, use_reentrant="mine")
        assert result["name"] == "mine"
        (result["sum"][0].square() * result["sum"][1]).sum().backward()
        assert x.grad is not None
        assert shift.grad is not None
        return [x.grad, shift.grad]

    assert_same(run)


def test_what_forward_appends_to_the_callers_list_is_appended_once() -> None:
    seen: list[str] = []

    def note(x: Tensor, into: list[str]) -> Tensor:
        into.append("called")
        return x.sin()

    checkpoint(note, sample(requires_grad=True), seen).sum().backward()
    assert seen == ["called"]


def test_nested_calls() -> None:
    def run(call: Call) -> list[Tensor]:
        layers = blocks(4, dropout=0.25)

        def half(x: Tensor, *, first: int) -> Tensor:
            return call(layers[first + 1], call(layers[first], x, scale=1.5), shift=x)

        def everything(x: Tensor) -> Tensor:
            return call(half, call(half, x, first=0), first=2)

        call(everything, sample(requires_grad=True)).square().sum().backward()
        return gradients(layers)

    assert_same(run)


def test_accumulation_in_any_order_of_backwards() -> None:
    def run(call: Call) -> list[Tensor]:
        layers = blocks(dropout=0.5)
        losses = [chain(call, layers, sample(seed)).square().sum() for seed in range(3)]
        for i in (1, 0, 2):
            losses[i].backward()
        return gradients(layers)

    assert_same(run)


def test_backward_any_number_of_times_with_retain_graph() -> None:
    layers = blocks(dropout=0.5)
    loss = chain(checkpoint, layers, sample(requires_grad=True)).square().sum()
    results = []
    for retain in (True, True, True, False):
        layers.zero_grad()
        loss.backward(retain_graph=retain)
        results.append(gradients(layers))
    for later in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], later, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_autograd_grad_with_respect_to_some() -> None:
    def run(call: Call) -> list[Tensor]:
        layers, x = blocks(dropout=0.5), sample(requires_grad=True)
        weight, bias = layers.get_parameter("1.up.weight"), layers.get_parameter("2.down.bias")
        y = chain(call, layers, x)
        return [
            *torch.autograd.grad(y.sum(), [x, weight], retain_graph=True),
            *torch.autograd.grad(y.square().sum(), [bias]),
        ]

    assert_same(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_recompute_has_forwards_autocast(dtype: torch.dtype) -> None:
    def run(call: Call) -> list[Tensor]:
        layers = blocks()
        with torch.autocast("cpu", dtype=dtype):
            y = chain(call, layers, sample(requires_grad=True))
        assert y.dtype == dtype
        y.float().square().sum().backward()
        return gradients(layers)

    assert_same(run)


def test_backward_inside_autocast_recomputes_without_it() -> None:
    def run(call: Call) -> list[Tensor]:
        layers = blocks()
        loss = chain(call, layers, sample(requires_grad=True)).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        return gradients(layers)

    assert_same(run)


def test_the_recompute_ends_with_the_last_tensor_that_is_missing() -> None:
    block = Block()
    checkpoint(block, sample(requires_grad=True)).sum().backward()
    assert (block.num_begun, block.num_ended) == (2, 1)


def test_without_gradients_it_is_a_plain_call() -> None:
    block = Block()
    with torch.no_grad():
        y = checkpoint(block, sample())
    assert not y.requires_grad
    assert block.num_begun == 1


def scaled(x: Tensor, *, by: list[Tensor]) -> Tensor:
    return (x * by[0]).tanh()


def test_an_argument_that_is_overwritten_before_backward_is_refused() -> None:
    x, other = sample(requires_grad=True), sample(2)
    y = checkpoint(scaled, x, by=[other])
    other.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_recompute_of_other_shapes_names_the_first() -> None:
    sizes = iter([4, 3])

    def changing(x: Tensor) -> Tensor:
        part = x.tanh()[: next(sizes)]
        return part.exp().sin().sum()

    loss = checkpoint(changing, sample(requires_grad=True))
    first = r"tensor at position 1:\nsaved metadata: .*\[4, 6\].*\nrecomputed metadata: .*\[3, 6\]"
    with pytest.raises(CheckpointError, match=first):
        loss.backward()


def test_a_recompute_of_another_dtype_is_refused() -> None:
    dtypes = iter([torch.float32, torch.float64])
    loss = checkpoint(lambda x: x.to(next(dtypes)).exp().sum(), sample(requires_grad=True))
    with pytest.raises(CheckpointError, match=r"saved metadata: .*float32.*\n.*float64"):
        loss.backward()


def test_a_recompute_of_fewer_tensors_is_refused() -> None:
    repeats = iter([3, 1])

    def changing(x: Tensor) -> Tensor:
        for _ in range(next(repeats)):
            x = x.exp()
        return x.sum()

    loss = checkpoint(changing, sample(requires_grad=True))
    with pytest.raises(CheckpointError, match=r"saved during forward: 3\n.*recomputation: 1"):
        loss.backward()


def test_errors_of_the_function_are_its_own() -> None:
    def fail(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        checkpoint(fail, sample(requires_grad=True))


def test_saved_tensors_are_hidden_from_memory_until_backward() -> None:
    """Four layers that each save eight of their inputs; kept are the inputs alone."""
    x = torch.randn(2**16, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin()
        return x

    def step(call: Call) -> int:
        def run() -> None:
            y = x
            for _ in range(4):
                y = call(layer, y)
            y.sum().backward()
            x.grad = None

        run()
        return measured_peak_bytes(run)

    nbytes = x.untyped_storage().nbytes()
    assert step(plainly) >= 32 * nbytes
    assert step(checkpoint) <= 15 * nbytes


@dataclass
class Alive:
    """Record which of the tensors that a backward reads are live, each time one is read."""

    references: list[weakref.ref[Tensor]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def count(self) -> int:
        return sum(r() is not None for r in self.references)


class Read(torch.autograd.Function):
    """A sine that counts what is alive before its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: Alive) -> Tensor:
        y = x.clone()
        alive.references.append(weakref.ref(y))
        ctx.save_for_backward(y)
        ctx.alive = alive
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        ctx.alive.counts.append(ctx.alive.count())
        return grad * x.cos(), None


def reading(x: Tensor, alive: Alive) -> Tensor:
    for _ in range(4):
        x = Read.apply(x, alive)  # type: ignore[no-untyped-call]
    return x


def test_a_recomputed_tensor_dies_at_its_last_use_also_with_retain_graph() -> None:
    alive = Alive()
    y = checkpoint(reading, sample(requires_grad=True), alive).sum()
    assert alive.count() == 0
    for retain in (True, True, False):
        alive.counts.clear()
        y.backward(retain_graph=retain)
        assert alive.counts == [4, 3, 2, 1]
        assert alive.count() == 0


def test_nothing_is_alive_after_a_backward_that_an_exception_ended() -> None:
    alive = Alive()
    x = sample(requires_grad=True)
    y = checkpoint(reading, x, alive)

    def fail(_: Tensor) -> None:
        raise KeyError("mine")

    x.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        y.sum().backward()
    assert alive.counts == [4, 3, 2, 1]
    assert alive.count() == 0


def test_arguments_are_let_go_of_with_the_graph() -> None:
    kept = sample()
    alive = weakref.ref(kept)
    x = sample(requires_grad=True)
    y = checkpoint(scaled, x, by=[kept])
    del kept
    assert alive() is not None
    y.sum().backward()
    assert alive() is None


def test_a_compiled_module_inside_is_recomputed() -> None:
    def run(call: Call) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        compiled = CompiledModule(layer)
        loss = call(lambda x: compiled(x).tanh(), sample()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(layer)

    assert_same(run)


class UsesCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = thunder_memsave.checkpoint(self.first, x).tanh()
        return checkpoint(self.second, x)


def test_inside_a_model_that_is_captured_it_is_pytorchs_own() -> None:
    results = []
    for wrap in (CompiledModule, lambda m: m):
        model = UsesCheckpoint()
        wrap(model)(sample()).square().sum().backward()
        results.append(gradients(model))
    torch.testing.assert_close(*results)


class KeywordsOfTheFunction(nn.Module):
    """A layer whose keywords are names that PyTorch's checkpoint has too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return thunder_memsave.checkpoint(
            self.scaled, x, debug=2.0, use_reentrant=3.0, context_fn=5.0, early_stop=x
        )

    def scaled(
        self,
        x: Tensor,
        *,
        debug: float,
        use_reentrant: float,
        context_fn: float,
        early_stop: Tensor,
    ) -> Tensor:
        result = self.layer(x).tanh() * (debug * use_reentrant * context_fn) + early_stop
        assert isinstance(result, Tensor)
        return result


def test_all_keywords_belong_to_the_function_in_a_model_that_is_captured_too() -> None:
    model, x = KeywordsOfTheFunction(), sample()
    torch.testing.assert_close(CompiledModule(model)(x), model(x))
    regions = torch.ops.higher_order.tag_activation_checkpoint
    graph = capture(model, CapturedCall.of(model, (x,), {}), reason="first call").graph
    assert len(graph.graph.find_nodes(op="call_function", target=regions)) == 1


def test_the_name_is_the_function_whatever_was_imported() -> None:
    import thunder_memsave.checkpoints.commit
    from thunder_memsave.checkpoints import CheckpointError as StateError

    assert thunder_memsave.checkpoint is checkpoint
    assert issubclass(StateError, Exception)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_numbers_of_cuda_without_a_tensor_argument() -> None:
    def run(call: Call) -> list[Tensor]:
        torch.cuda.manual_seed(0)
        weight = torch.ones(64, device="cuda", requires_grad=True)
        call(lambda: F.dropout(weight * 2, 0.5).square()).sum().backward()
        assert weight.grad is not None
        return [weight.grad.cpu(), torch.rand(3, device="cuda").cpu()]

    assert_same(run)

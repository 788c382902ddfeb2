"""Results are written over operands where that changes no number, and nowhere else."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.memory import measured_peak_bytes
from harness.predicted_peaks import planned_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.ops.in_place import _over_gradient
from thunder_memsave.planner.devices import device

ROWS, TOKENS, WIDTH = 3, 5, 4
Forward = Callable[[nn.Module, Tensor], Any]
IN_PLACE = (
    *("write_at_in_place", "write_slice_in_place", "add_at_in_place", "add_slice_in_place"),
    *("relu_in_place", "mul_tensor_in_place", "add_tensor_in_place", "exp_in_place"),
    *("gelu_backward_in_place", "silu_backward_in_place", "sigmoid_backward_in_place"),
    *("tanh_backward_in_place", "hardtanh_backward_in_place"),
)


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def recurrence(net: Any, x: Tensor) -> Tensor:
    """Write a state at each token, as RecurrentGemma does."""
    x, gate = net.layer(x), net.gate(x).sigmoid()
    state, states = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(TOKENS):
        state = gate[:, i] * state + x[:, i]
        states[:, i] = state
    return states


def two_tokens(net: Any, x: Tensor) -> Tensor:
    x = net.layer(x)
    found = torch.zeros_like(x)
    for i in range(0, TOKENS - 1, 2):
        found[:, i : i + 2] = x[:, i : i + 2] * x[:, i + 1 : i + 3]
    return found


def read_between(net: Any, x: Tensor) -> Tensor:
    """A view of what is there before the write is read after it."""
    x = net.layer(x)
    states = torch.zeros_like(x)
    states[:, 0] = x[:, 0]
    before = states[:, 0].clone()
    states[:, 0] = x[:, 1]
    return before * states[:, 0] + states.sum(1)


def read_in_backward(net: Any, x: Tensor) -> Tensor:
    """Backward reads what is there before the write."""
    states = net.layer(x).exp()
    squares = states * states
    states = states.clone()
    states[:, 1] = squares[:, 0]
    return states * squares


def scaled_sums(net: Any, x: Tensor) -> Tensor:
    """A sum and a difference have a factor for their second operand."""
    return torch.sub(torch.add(net.layer(x), x, alpha=-0.5), x.sin(), alpha=3)


def shifted(net: Any, x: Tensor) -> Tensor:
    """What is written comes from the tensor itself."""
    x = net.layer(x).sin()
    x[:, 1:] = x[:, :-1].clone()
    return x


def returned(net: Any, x: Tensor) -> Any:
    x = net.layer(x)
    first = torch.zeros_like(x)
    first[:, 1] = x[:, 0]
    return first, torch.select_scatter(first, x[:, 3], 1, 2)


def repeated(net: Any, x: Tensor) -> Tensor:
    """The tensor that is written has one row for all."""
    x = net.layer(x)
    one = x[:1].sin().expand(ROWS, TOKENS, WIDTH)
    return torch.select_scatter(one, x[:, 3], 1, 2)


def sums(net: Any, x: Tensor) -> Tensor:
    x = net.layer(x)
    return x[:, 0] * x[:, 1] + x[:, 1] * x[:, 2] + x[:, 1:4].prod(1)


def chain(net: Any, x: Tensor) -> Tensor:
    """Nothing but the sum reads the first products; backward reads the exponential."""
    x = (net.layer(x) * 2.0 + 1.0).relu()
    return x * (net.gate(x) + x).exp()


def narrow(net: Any, x: Tensor) -> Any:
    """The product has another type or shape than its first factor."""
    x = net.layer(x).sin()
    one = x.mean(1, keepdim=True).cos() * x
    return one, x.bfloat16() * x, (x.half() + 1.0).exp()


def unsafe_views(net: Any, x: Tensor) -> Tensor:
    """Their schemas do not say that they share memory."""
    x = net.layer(x) * 2.0
    first, second = torch.unsafe_split(x, 3, 1)
    folded = torch.ops.aten._unsafe_view(x, [ROWS * TOKENS, WIDTH]).exp()
    return first.relu().sum() + second.neg().sum() + x.sin() + folded.view_as(x)


def twice(net: Any, x: Tensor) -> Tensor:
    x = net.layer(x).sin()
    return (x + x) * x.view(-1)[:1]


def spectrum(net: Any, x: Tensor) -> Tensor:
    """Complex numbers side by side along the tokens: a product in place rounds otherwise."""
    found = torch.fft.rfft(net.layer(x), dim=1)
    factor = torch.complex(net.gate.weight, net.layer.weight)[: TOKENS // 2 + 1]
    return torch.fft.irfft(found * factor / (factor + 3), n=TOKENS, dim=1)


def activations(net: Any, x: Tensor) -> Tensor:
    """Linear layers of three dims: backward has views of the gradients that products of two make."""
    x = net.gate(F.gelu(net.layer(x)))
    x = net.gate(F.gelu(net.layer(x), approximate="tanh"))
    x = net.gate(F.silu(net.layer(x)))
    x = net.gate(net.layer(x).sigmoid())
    x = net.gate(net.layer(x).tanh())
    return net.gate(F.hardtanh(net.layer(x)))


def branches(net: Any, x: Tensor) -> Tensor:
    """Gradients that lie otherwise than what the functions read, or are other branches' too."""
    x = net.layer(x)
    x = net.gate(F.gelu(x) + x) + F.gelu(x)
    x = F.gelu(net.layer(x).transpose(0, 1)).transpose(0, 1)
    return F.silu(net.gate(x)).mT @ x.sigmoid()


FORWARDS = [
    *(
        recurrence,
        chain,
        narrow,
        unsafe_views,
        twice,
        two_tokens,
        read_between,
        read_in_backward,
        shifted,
        scaled_sums,
        spectrum,
    ),
    *(returned, repeated, sums, activations, branches),
]


def compiled(net: Net, **options: Any) -> CompiledModule:
    return CompiledModule(net, config=CompileConfig(**options))


def count(module: CompiledModule) -> Counter[str]:
    (capture,) = module.captures
    traces = [capture.forward_traces[-1], *(t[-1] for t in [capture.backward_traces] if t)]
    names = Counter(b.sym.name for t in traces for b in t.bound_symbols)
    return Counter({name: names[name] for name in IN_PLACE if names[name]})


def results(module: nn.Module, net: Net, *, again: bool = False) -> list[Tensor]:
    """Return outputs and gradients, of two backwards if `again`."""
    found: list[Tensor] = []
    for seed in range(2):
        x = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
        outputs = module(x.requires_grad_())
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = torch.stack([o.square().sum() for o in outputs]).sum()
        for keeps in [True, False] if again else [False]:
            net.zero_grad()
            x.grad = None
            loss.backward(retain_graph=keeps)
            assert x.grad is not None
            found += [x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        found += [o.detach().clone() for o in outputs]
    return found


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_every_number_is_eagers(forward: Forward, again: bool) -> None:
    net = Net(forward)
    eager = copy.deepcopy(net)
    pairs = zip(
        results(compiled(net), net, again=again), results(eager, eager, again=again), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_numbers_are_those_without_the_step(forward: Forward, policy: Any) -> None:
    def run(**options: Any) -> list[Tensor]:
        net = Net(forward)
        memory = MemoryConfig(policy=policy)
        planner = MemoryPlanner(memory, device=device("cpu"), budget_bytes=None)
        module = CompiledModule(net, config=CompileConfig(**options), planner=planner)
        return results(module, net)

    assert all(map(torch.equal, run(), run(leave_out=("write_in_place",))))


def test_a_loop_over_tokens_copies_no_states() -> None:
    module = compiled(net := Net(recurrence))
    results(module, net)
    (capture,) = module.captures
    forward = Counter(b.sym.name for b in capture.forward_traces[-1].bound_symbols)
    assert forward["write_at_in_place"] == TOKENS
    assert not forward["aten_copy"] + forward["aten_select_scatter"]
    found = count(module)
    assert found["write_at_in_place"] >= 2 * TOKENS - 2
    assert found["add_at_in_place"] >= 2 * (TOKENS - 1) - 1


def test_activations_and_sums_of_gradients_need_no_memory() -> None:
    module = compiled(net := Net(chain))
    results(module, net)
    assert count(module)["relu_in_place"] == 1
    assert count(module)["add_tensor_in_place"] >= 2


def test_gradients_of_functions_are_written_over_those_that_they_read() -> None:
    module = compiled(net := Net(activations))
    results(module, net)
    found = count(module)
    assert found["gelu_backward_in_place"] == 2
    for name in ("silu", "sigmoid", "tanh", "hardtanh"):
        assert found[f"{name}_backward_in_place"] == 1, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7,), (64,), (3, 5, 7), (257, 513)])
@pytest.mark.parametrize("name", ["gelu", "silu", "sigmoid", "tanh", "hardtanh"])
def test_a_gradient_has_the_bits_and_layout_of_a_new_one(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    backward = getattr(torch.ops.aten, f"{name}_backward")
    others = (-1.0, 1.0) if name == "hardtanh" else ()
    options = [{}, {"approximate": "tanh"}] if name == "gelu" else [{}]
    torch.manual_seed(0)
    for turned, option in itertools.product(itertools.product((False, True), repeat=2), options):
        gradient, x = (
            torch.randn(shape).to(dtype).mul(2).mT.contiguous().mT
            if turn and len(shape) > 1
            else torch.randn(shape).to(dtype).mul(2)
            for turn in turned
        )
        expected = backward.default(gradient, x, *others, **option)
        written = gradient.clone()
        found = _over_gradient(backward.grad_input, written, x, *others, **option)
        assert found.data_ptr() == written.data_ptr()
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("forward", [returned, repeated], ids=lambda f: f.__name__)
def test_what_is_read_later_or_has_one_row_for_all_is_copied(forward: Forward) -> None:
    module = compiled(net := Net(forward))
    results(module, net)
    names = Counter(b.sym.name for b in module.captures[-1].forward_traces[-1].bound_symbols)
    assert names["aten_select_scatter"] == 1


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
@pytest.mark.parametrize("forward", [recurrence, two_tokens, sums, chain], ids=lambda f: f.__name__)
def test_the_peak_is_that_of_the_plan(forward: Forward, policy: Any) -> None:
    planner = MemoryPlanner(MemoryConfig(policy=policy), device=device("cpu"), budget_bytes=None)
    module = CompiledModule(net := Net(lambda n, x: forward(n, x).sum()), planner=planner)
    x = torch.randn(64, TOKENS, WIDTH)

    def step() -> None:
        module(x).backward()

    step()
    net.zero_grad()
    assert planned_bytes(planner.calls[-1]) == measured_peak_bytes(step)
    assert count(module)

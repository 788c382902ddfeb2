"""Values that are not kept are recomputed in backward: late, once, with the same bits, and nothing more is saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import cse
from thunder.dev_utils.check_trace import check_trace
from torch import Tensor, nn

from harness import models
from harness.recompute import (
    Choice,
    at_random,
    everything,
    joint_trace,
    nothing,
    recomputing,
    run_joint,
)
from passes.contract import Probe
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import PlanError
from thunder_memsave.measure.devices import device_at
from thunder_memsave.passes.recompute import recompute
from thunder_memsave.passes.repeatable import why_not_repeatable
from thunder_memsave.planner.actions import KEEP, NO_ACTIONS, RECOMPUTE, Action, Actions, keeping


class DenseExperts(nn.Module):
    """Every expert computes every token; a router weighs the two best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = torch.where(chosen == number, weights, 0.0).sum(-1, keepdim=True)
            y = y + weight * expert(nn.functional.dropout(x, 0.1, self.training))
        return y


class Normalized(nn.Module):
    """Overwrites buffers that it has read."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)) + self.scale
        self.scale.add_(1.0)
        return self.second(y).relu() * self.scale


class Doubling(nn.Module):
    """Overwrites a value that it computed, which only forward has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).mul_(2.0).sin())


def written_after(y: Tensor, buffer: Tensor) -> Tensor:
    z = y * buffer.clone()
    buffer.add_(1.0)
    return z


def view_written_after(y: Tensor, buffer: Tensor) -> Tensor:
    z = (y + buffer.view(8, 6).t().reshape(6, 8)).sin()
    buffer.mul_(2.0)
    return z * buffer


def written_twice_between(y: Tensor, buffer: Tensor) -> Tensor:
    z = (y + buffer).exp() * buffer.exp().log()
    buffer.add_(1.0)
    buffer.add_(1.0)
    return (z * buffer).tanh()


class Written(nn.Module):
    """Writes to a buffer of which no derivative reads the old numbers, but those that are computed from them."""

    buffer: Tensor

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.run = nn.Linear(8, 8), run
        self.register_buffer("buffer", torch.rand(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.linear(x), self.buffer)


IDS = models.token_batch()
TOKENS: dict[str, Any] = {"input_ids": IDS, "labels": IDS}
DROPOUT: dict[str, Any] = {"resid_pdrop": 0.5, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
BERT: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.5}
VECTORS: dict[str, Any] = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(0))}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "gpt2": (lambda: models.gpt2(2, **DROPOUT), TOKENS),
    "llama": (lambda: models.llama(2), TOKENS),
    "qwen2": (lambda: models.qwen2(2, tie_word_embeddings=True), TOKENS),
    "bert": (lambda: models.bert(**BERT), TOKENS),
    "experts": (DenseExperts, {"input": VECTORS["x"]}),
    "normalized": (Normalized, VECTORS),
    "doubling": (Doubling, VECTORS),
}


def step(
    build: Callable[[], nn.Module], named: dict[str, Tensor], choose: Choice | None
) -> list[Tensor]:
    """Gradients, buffers and the generator's state after two micro-batches, one with two backwards."""
    torch.manual_seed(0)
    model = build().train()
    with recomputing(choose or everything):
        module = CompiledModule(model)
        torch.manual_seed(1)
        for _ in range(2):
            output = module(*named.values()) if "input" in named else module(**named)
            loss = output if isinstance(output, Tensor) else output[0]
            loss.square().sum().backward(retain_graph=True)
            loss.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) >= 4
    return [*gradients, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize(("build", "named"), MODELS.values(), ids=MODELS)
def test_gradients_generator_and_buffers_keep_their_bits(
    build: Callable[[], nn.Module], named: dict[str, Tensor]
) -> None:
    """Gradients accumulate, and one forward has two backwards."""
    reference = step(build, named, None)
    for choose in (nothing, at_random(0.3)):
        for ours, expected in zip(step(build, named, choose), reference, strict=True):
            assert torch.equal(ours, expected)


@pytest.fixture(scope="module")
def llama() -> TraceCtx:
    return joint_trace(models.llama(2), **TOKENS)


def inputs_of(trace: TraceCtx) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [
        IDS if a.name.endswith("ids_") or "labels" in a.name else torch.rand(a.shape, generator=g)
        for a in trace.args
    ]


def clones(trace: TraceCtx) -> list[Any]:
    return [b for b in trace.bound_symbols if BoundSymbolTag.RECOMPUTE_IN_BACKWARD in b.tags]


def test_what_is_saved_is_what_is_kept_and_needed_besides_arguments_and_outputs(
    llama: TraceCtx,
) -> None:
    keep = at_random(0.2)(llama)
    step = run_joint(recompute(llama, actions=keeping(keep)), inputs_of(llama))
    outputs = {o.name for o in llama.bound_symbols[-1].args[0]["fw_flat_out"]}
    there = {a.name for a in llama.args} | outputs
    assert set(step.saved) - there <= keep
    assert set(step.saved) & keep


def test_nothing_but_arguments_and_outputs_need_be_saved(llama: TraceCtx) -> None:
    step = run_joint(recompute(llama, actions=NO_ACTIONS), inputs_of(llama))
    outputs = {o.name for o in llama.bound_symbols[-1].args[0]["fw_flat_out"]}
    assert set(step.saved) <= {a.name for a in llama.args} | outputs


def test_where_all_is_kept_the_trace_stays_the_same(llama: TraceCtx) -> None:
    assert recompute(llama, actions=keeping(everything(llama))) is llama


def test_the_trace_is_valid_and_its_provenance_names_the_pass(llama: TraceCtx) -> None:
    again = recompute(llama, actions=keeping(at_random(0.3)(llama)))
    check_trace(again)
    assert "Joint pass recompute" in str(again.get_provenance())


def test_each_symbol_has_at_most_one_clone_with_names_of_its_own(llama: TraceCtx) -> None:
    names = [
        o.name for b in clones(recompute(llama, actions=NO_ACTIONS)) for o in b.flat_proxy_outs
    ]
    assert len(names) == len(set(names)) > 50
    assert all(name.startswith("bw_") for name in names)
    assert all(
        BoundSymbolTag.BACKWARD in b.tags for b in clones(recompute(llama, actions=NO_ACTIONS))
    )


def test_a_plan_leaves_the_trace_to_the_next_one(llama: TraceCtx) -> None:
    before = str(llama)
    first, second = (
        str(recompute(llama, actions=keeping(at_random(0.3)(llama)))) for _ in range(2)
    )
    assert first == second
    assert str(llama) == before


def test_a_clone_runs_right_before_its_first_reader() -> None:
    trace = joint_trace(Probe(), torch.randn(5, 8))
    again = recompute(trace, actions=keeping(everything(trace) - {linear_of(trace)}))
    (clone,) = clones(again)
    follows = again.bound_symbols[again.bound_symbols.index(clone) + 1]
    assert clone.output.name in {a.name for a in follows.flat_proxy_args}


def linear_of(trace: TraceCtx) -> str:
    """Return the first linear's result, which the derivative of gelu reads."""
    return next(str(b.output.name) for b in trace.bound_symbols if b.sym.name == "aten_addmm")


def test_a_view_of_a_kept_value_is_recomputed_instead_of_saved() -> None:
    class Views(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).exp()
            return y.t().view(4, 2, 5).transpose(0, 1).sin() + y.sum()

    trace = joint_trace(Views(3, 4), torch.randn(10, 3))
    base = next(b.output.name for b in trace.bound_symbols if b.sym.name == "aten_exp")
    step = run_joint(
        recompute(trace, actions=keeping({base})), [torch.rand(a.shape) for a in trace.args]
    )
    assert set(step.saved) == {base, "t_l_x_"}


@pytest.mark.parametrize("action", [KEEP, RECOMPUTE])
def test_an_unknown_name_is_refused(llama: TraceCtx, action: Action) -> None:
    with pytest.raises(PlanError, match=r"actions for 'nonsense' and 0 other .* make a new plan"):
        recompute(llama, actions=Actions({"nonsense": action}))


def test_what_is_read_before_it_is_overwritten_is_not_recomputed() -> None:
    trace = joint_trace(Normalized().train(), VECTORS["x"])
    reasons = why_not_repeatable(trace.bound_symbols).values()
    assert any(r.startswith("reads 't_scale', which is overwritten later") for r in reasons)
    recompute(trace, actions=keeping(nothing(trace)))


def test_a_plan_that_recomputes_what_reads_it_is_refused() -> None:
    trace = joint_trace(Normalized().train(), VECTORS["x"])
    with pytest.raises(
        PlanError,
        match=r"recomputed: aten_add_Tensor reads 't_scale', which is overwritten later \(at .*\)\. Keep '\w+'",
    ):
        recompute(trace, actions=NO_ACTIONS)


def test_values_that_were_changed_in_place_are_recomputed_like_others() -> None:
    trace = joint_trace(Doubling(), VECTORS["x"])
    again = recompute(trace, actions=NO_ACTIONS)
    assert "aten_mul_Tensor" in {b.sym.name for b in clones(again)}


def test_merging_equal_expressions_leaves_the_clones() -> None:
    trace = joint_trace(Probe(), torch.randn(5, 8))
    again = recompute(trace, actions=keeping(everything(trace) - {linear_of(trace)}))
    assert [b.sym.name for b in clones(cse(again))] == ["aten_addmm"]


def long_trace(num_symbols: int) -> TraceCtx:
    """Return a chain of `num_symbols / 2` sines and its backward."""
    trace = TraceCtx(lambda x: None)
    with tracectx(trace):
        x = TensorProxy("x", shape=(2,), device=devices.cpu, dtype=dtypes.float32)
        trace.args, trace.kwargs = (x,), {}
        prims.unpack_trivial(x, name="x")
        values = [x]
        for _ in range(num_symbols // 2):
            values.append(prims.sin(values[-1]))
        grad = prims.get_grad(values[-1])
        for value in reversed(values[:-1]):
            grad = prims.mul(grad, value)
        prims.python_return({"output": (grad,), "flat_args": [x], "fw_flat_out": (values[-1],)})
    return trace


def test_forty_thousand_symbols_take_seconds() -> None:
    trace = long_trace(40_000)
    start = time.process_time()
    again = recompute(trace, actions=keeping({"x"}))
    assert len(again.bound_symbols) == pytest.approx(60_000, abs=10)
    assert time.process_time() - start < 15


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
@pytest.mark.parametrize("run", [written_after, view_written_after, written_twice_between])
def test_backward_reads_what_a_buffer_was_when_forward_read_it(run: Any, policy: Any) -> None:
    memory = MemoryConfig(policy=policy)
    planner = MemoryPlanner(memory, device=device_at(torch.device("cpu")), budget_bytes=None)
    ours, eager = Written(run), Written(run)
    compiled = CompiledModule(ours, planner=planner)
    for _ in range(2):
        for module in (compiled, eager):
            module(VECTORS["x"]).square().sum().backward()
    assert torch.equal(ours.buffer, eager.buffer)
    for p, reference in zip(ours.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None
        assert reference.grad is not None
        assert torch.equal(p.grad, reference.grad)

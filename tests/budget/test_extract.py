"""Graphs and programs are extracted from traces, and predict the measured peak to the byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from thunder.core import prims
from thunder.core.devices import cpu
from thunder.core.dtypes import float32
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import TemporaryExecutor
from torch import Tensor, nn

from harness.memory import joint_traces, measured_memory
from harness.models import gpt2, llama, qwen2, token_batch
from harness.traces import fake_ranks
from thunder_memsave.budget.extract import profiles, training_graph
from thunder_memsave.budget.running_program import program
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CompileError
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.measure.scratch import MeasuredScratch
from thunder_memsave.planner.graph import Op, Program, TrainingGraph
from thunder_memsave.planner.simulate import simulate
from thunder_memsave.sharding.rows import shard_module


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> OpProfiles:
    return profiles(scratch=MeasuredScratch(directory=tmp_path_factory.mktemp("scratch")))


@dataclass
class Extracted:
    """A model that was called once, with the graph and program extracted from its traces."""

    module: CompiledModule
    graph: TrainingGraph
    program: Program

    @property
    def constant_bytes(self) -> int:
        """Bytes that were live before."""
        return sum(self.program.storages[s].nbytes for s in self.program.held)


def extracted(
    model: nn.Module,
    known: OpProfiles,
    *,
    differentiated: set[int] | None = None,
    **inputs: Tensor,
) -> Extracted:
    module = CompiledModule(model)
    with joint_traces() as joint:
        module(**inputs)
    compiled = module.captures[0]
    backward = compiled.backward_traces[-1] if compiled.backward_traces else None
    return Extracted(
        module,
        training_graph(joint[0], known=known),
        program(compiled.forward_traces[-1], backward, known=known, differentiated=differentiated),
    )


def lora() -> nn.Module:
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    return get_peft_model(llama(1), config)


def bf16_llama() -> nn.Module:
    return nn.Module.to(llama(2), torch.bfloat16)


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


def dropping_gpt2() -> nn.Module:
    return gpt2(1, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


Context = Callable[[], AbstractContextManager[object]]


@pytest.mark.parametrize(
    ("model", "context"),
    [
        pytest.param(llama, nullcontext, id="llama"),
        pytest.param(lambda: qwen2(2), nullcontext, id="qwen2"),
        pytest.param(lambda: gpt2(2), nullcontext, id="gpt2"),
        pytest.param(dropping_gpt2, nullcontext, id="gpt2-dropout"),
        pytest.param(lora, nullcontext, id="lora-dropout"),
        pytest.param(bf16_llama, nullcontext, id="llama-bf16"),
        pytest.param(llama, autocast, id="llama-autocast"),
    ],
)
def test_predicted_peaks_are_the_measured_ones_to_the_byte(
    model: Callable[[], nn.Module], context: Context, known: OpProfiles
) -> None:
    torch.manual_seed(0)
    module, tokens = model(), token_batch(2, 24)
    with context():
        found = extracted(module, known, differentiated={0}, input_ids=tokens, labels=tokens)
        forward, step = measured_call(found.module, tokens)
    predicted = simulate(found.program)
    assert predicted.peak_bytes - found.constant_bytes == step.peak_bytes
    assert predicted.forward_peak_bytes - found.constant_bytes == forward.peak_bytes
    outputs = [found.graph.storages[s].nbytes for s in found.graph.outputs]
    assert predicted.live_bytes[-1] - found.constant_bytes + sum(outputs) == step.end_bytes


def measured_call(module: CompiledModule, tokens: Tensor) -> Any:
    """Forward alone, and forward and backward, while the caller holds the outputs."""

    def step() -> object:
        output = module(input_ids=tokens, labels=tokens)
        output.loss.backward()
        return output

    measured_memory(step)
    module.zero_grad()
    forward = measured_memory(lambda: module(input_ids=tokens, labels=tokens))
    result = forward, measured_memory(step)
    module.zero_grad()
    return result


def test_the_memory_of_an_inference_is_the_measured_one(known: OpProfiles) -> None:
    model, tokens = llama(1).requires_grad_(False), token_batch(2, 24)
    found = extracted(model, known, input_ids=tokens)
    measured_memory(lambda: found.module(input_ids=tokens))
    measured = measured_memory(lambda: found.module(input_ids=tokens))
    predicted = simulate(found.program)
    assert predicted.peak_bytes - found.constant_bytes == measured.peak_bytes
    assert predicted.live_bytes[-1] - found.constant_bytes == measured.end_bytes
    assert found.graph.num_forward == len(found.graph.ops) == len(found.program.steps)
    assert not found.graph.gradients


class Probe(nn.Module):
    """Views, a mask, a counter that is written to, dropout, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        before = self.seen * 2.0
        self.seen.add_(1.0)
        y = nn.functional.dropout(y.view(2, 3, 8).transpose(0, 1), 0.5)
        return (y + before).relu()


@pytest.fixture(scope="module")
def probe(known: OpProfiles) -> Extracted:
    return extracted(Probe(), known, x=torch.ones(6, 6))


def ops_named(graph: TrainingGraph, symbol: str) -> list[Op]:
    return [op for op in graph.ops if symbol in op.symbol]


def test_views_share_the_storage_of_what_they_show_and_cost_nothing(probe: Extracted) -> None:
    (linear,) = ops_named(probe.graph, "aten_addmm")
    storage = probe.graph.storage_of[linear.results[0]]
    assert linear.makes == (storage,)
    views = [o for o in probe.graph.ops if o.repeat == "free" and o.reads == (storage,)]
    assert len(views) == 2
    for view in views:
        assert probe.graph.storage_of[view.results[0]] == storage
        assert (view.makes, view.peak_bytes, view.moved_bytes, view.flops) == ((), 0, 0, 0)


def test_a_product_counts_its_work_and_the_bytes_that_it_moves(probe: Extracted) -> None:
    (linear,) = ops_named(probe.graph, "aten_addmm")
    assert linear.flops == 2 * 6 * 6 * 8
    assert linear.moved_bytes == 4 * (6 * 6 + 6 * 8 + 8 + 6 * 8)
    assert linear.dtype == "float32"
    assert linear.repeat == "yes"


def test_random_numbers_are_replayed_and_writes_are_not_repeated(probe: Extracted) -> None:
    random = [o for o in probe.graph.ops if o.repeat == "replay"]
    assert len(random) == 1
    writes = ops_named(probe.graph, "copy_")
    assert [o.repeat for o in writes] == ["no"]
    seen = writes[0].reads[-1]
    before = [o for o in probe.graph.ops if seen in o.reads and o is not writes[0]]
    assert all(o.repeat == "no" for o in before if o.index < writes[0].index)


def test_forward_comes_first_and_every_name_is_there(probe: Extracted) -> None:
    graph = probe.graph
    forward, backward = graph.ops[: graph.num_forward], graph.ops[graph.num_forward :]
    assert forward
    assert backward
    assert [o.index for o in forward] == sorted(o.index for o in forward)
    made: set[str] = set()
    for op in graph.ops:
        given = set(op.arguments) - made
        assert {graph.storage_of[n] for n in given} <= graph.inputs | graph.cotangents
        made |= set(op.results)
    names = [s.name for s in graph.storages]
    assert len(set(names)) == len(names)


def test_storages_say_what_they_are(probe: Extracted) -> None:
    graph = probe.graph
    assert {graph.storages[s].kind for s in graph.gradients} == {"gradient"}
    assert {graph.storages[s].nbytes for s in graph.gradients} == {4 * 6 * 8, 4 * 8}
    assert {graph.storages[s].kind for s in graph.inputs} == {"parameter", "batch"}
    assert [graph.storages[s].kind for s in graph.cotangents] == ["cotangent"]
    assert [graph.storages[s].nbytes for s in graph.outputs] == [4 * 6 * 8]


def test_operations_name_the_line_and_the_module(probe: Extracted) -> None:
    (linear,) = ops_named(probe.graph, "aten_addmm")
    assert linear.module == "linear"
    (dropout,) = [o for o in probe.graph.ops if o.repeat == "replay"]
    assert dropout.source.startswith(__file__)
    assert all(o.source for o in probe.graph.ops)


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_an_operation_runs_once_however_many_layers_there_are() -> None:
    known = profiles()
    few = extracted(Stack(3), known, x=torch.ones(2, 8))
    num_runs = known.num_runs
    many = extracted(Stack(9), known, x=torch.ones(2, 8))
    assert len(many.graph.ops) > 2 * len(few.graph.ops)
    assert known.num_runs == num_runs


def test_tensors_tell_which_arguments_share_memory(known: OpProfiles) -> None:
    tied = nn.Linear(8, 8)
    module = CompiledModule(tied)
    with joint_traces() as joint:
        module(torch.ones(2, 8))
    weight = torch.zeros(8, 16)
    given = {"t_weight": weight[:, ::2], "t_bias": weight[0, :8]}
    names = {a.name for a in joint[0].args}
    assert set(given) <= names, names
    graph = training_graph(joint[0], tensors=given, kinds={"t_bias": "buffer"}, known=known)
    shared = graph.storages[graph.storage_of["t_weight"]]
    assert graph.storage_of["t_weight"] == graph.storage_of["t_bias"]
    assert shared.nbytes == 4 * 8 * 16


def test_cuda_allocates_whole_blocks() -> None:
    module = CompiledModule(nn.Linear(8, 8))
    with joint_traces() as joint:
        module(torch.ones(2, 8))
    graph = training_graph(joint[0], known=profiles(device_type="cuda"))
    assert {s.nbytes for s in graph.storages} == {512}
    assert all(o.peak_bytes % 512 == 0 for o in graph.ops)


def test_under_zero3_gathers_are_repeated_and_reductions_are_not() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    with fake_ranks(4) as data_parallel:
        shard_module(model, data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel)
        with joint_traces() as joint:
            module(torch.ones(2, 8))
        known = profiles()
        graph = training_graph(joint[0], known=known)
        (compiled,) = module.captures
        found = program(compiled.forward_traces[-1], compiled.backward_traces[-1], known=known)
    gathers, reductions = ops_named(graph, "all_gather"), ops_named(graph, "reduce_scatter")
    assert [(o.repeat, o.sent_bytes) for o in gathers] == [("yes", 4 * 8 * 16 * 3 // 4)] * 2
    assert [(o.repeat, o.sent_bytes) for o in reductions] == [("no", 4 * 8 * 16 * 3 // 4)] * 2
    assert {graph.storages[s].kind for o in gathers for s in o.makes} == {"gathered"}
    repeated = [s.op.symbol for s in found.steps if s.is_repeated and "all_gather" in s.op.symbol]
    assert len(repeated) == 1  # backward needs no gradient of the input
    # A reduction receives the unreduced gradient first, and holds it until the result is there; the mean is divided by
    # a number of float64 and float32.
    assert [o.peak_bytes for o in reductions] == [4 * 8 * 16 * 5 // 4 + 8 + 4] * 2


def test_what_does_not_run_without_data_is_named() -> None:
    executor = TemporaryExecutor()

    def choosy(x: Tensor) -> Tensor:
        return x * x.sum().item()

    trace = TraceCtx()
    with tracectx(trace):
        x = TensorProxy("x", shape=(2,), device=cpu, dtype=float32)
        operator = executor.register_operator(
            "choosy", meta=lambda x: TensorProxy(like=x), fn=choosy
        )
        trace.args = (x,)
        prims.python_return(operator(x))
    with pytest.raises(
        CompileError, match=r"choosy\S* cannot be planned for: it does not run on .* without data"
    ):
        training_graph(trace)


class Transposing(nn.Module):
    """Thunder gives the first weight's gradient transposed, and one gradient to both biases."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(4, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t() + self.biases[0] + self.biases[1]).sum()


def test_gradients_that_autograd_copies_are_predicted(known: OpProfiles) -> None:
    module, x = Transposing(), torch.randn(4, 32)
    found = extracted(module, known, x=x)
    copies = [s for s in found.program.steps if s.op.symbol == "accumulate_grad"]
    assert copies

    def step() -> object:
        output = found.module(x=x)
        output.backward()
        return output

    measured_memory(step)
    module.zero_grad()
    measured = measured_memory(step)
    predicted = simulate(found.program)
    assert predicted.peak_bytes - found.constant_bytes == measured.peak_bytes
    assert predicted.live_bytes[-1] - found.constant_bytes + 4 == measured.end_bytes


def test_gradients_that_are_added_to_others_die(known: OpProfiles) -> None:
    module = CompiledModule(nn.Linear(8, 8))
    module(torch.ones(2, 8))
    (compiled,) = module.captures
    traces = compiled.forward_traces[-1], compiled.backward_traces[-1]
    alone = simulate(program(*traces, known=known))
    added = simulate(program(*traces, known=known, accumulates=True))
    assert alone.live_bytes[-1] - added.live_bytes[-1] == 4 * (8 * 8 + 8)
    assert alone.peak_bytes == added.peak_bytes


def test_parameters_that_are_gathered_together_die_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    with fake_ranks(4) as data_parallel:
        bucketed = replace(data_parallel, prefetch=10**6, bucket_bytes=10**6)
        shard_module(model, bucketed)
        module = CompiledModule(model, data_parallel=bucketed)
        module(torch.ones(2, 8))
        (compiled,) = module.captures
        found = program(compiled.forward_traces[-1], compiled.backward_traces[-1])
    forward = found.steps[: found.num_forward]
    (gather,) = [s for s in forward if s.op.symbol == "all_gather_bucket"]
    freed_by = [s.op.symbol for m in gather.makes for s in forward if m in s.frees]
    assert freed_by == ["aten_mm", "aten_mm"]
    whole_bytes = 4 * 8 * 16
    # The results, one flat buffer for what goes out, one for what comes in, and as much in gloo.
    assert gather.op.peak_bytes == 2 * whole_bytes + 2 * whole_bytes // 4 + 2 * 2 * whole_bytes
    assert gather.op.sent_bytes == 2 * whole_bytes * 3 // 4


class Counting(nn.Module):
    """Returns a loss, the values it is computed from, and values without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.up(x).tanh()
        y = self.down(hidden)
        return y.sum(), hidden, y.argmax(-1)


def test_zeros_for_outputs_that_nothing_is_computed_from_are_predicted(known: OpProfiles) -> None:
    model, x = Counting(), torch.randn(8, 16)
    found = extracted(model, known, differentiated={0}, x=x)

    def step() -> object:
        outputs = found.module(x=x)
        outputs[0].backward()
        return outputs

    measured_memory(step)
    model.zero_grad()
    measured = measured_memory(step)
    assert simulate(found.program).peak_bytes - found.constant_bytes == measured.peak_bytes

"""The list of steps is what is done to a trace: in order, recorded, written to files, and with steps left out."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

import thunder_memsave.compiler.pipeline as pipeline_module
from harness.distributed import run_on_ranks
from harness.traces import num_calls
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.compiler.explain_steps import explain_steps
from thunder_memsave.compiler.pipeline import STEPS
from thunder_memsave.compiler.state import State
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.measure.devices import device_at
from thunder_memsave.ops.accumulation import accumulated_names
from thunder_memsave.passes.step import Step
from thunder_memsave.settings.step_names import WHY_NEEDED
from thunder_memsave.sharding.rows import shard_module

NAMES = [step.name for step in STEPS]
OPTIONAL = (
    "leave_out_zeros",
    "join_views",
    "merge_equal",
    "gather_in_compute_dtype",
    "gather_in_fp8",
    "add_embedding_gradients",
    "tile_rows",
    "regather",
    "recompute_in_kernels",
    "schedule",
    "add_gradients",
    "update_in_place",
    "write_in_place",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * 2.0
        return x + self.down(nn.functional.gelu(y))


def planner(policy: Any, data_parallel: DataParallel | None = None) -> MemoryPlanner:
    return MemoryPlanner(
        MemoryConfig(policy=policy),
        device=device_at(torch.device("cpu")),
        budget_bytes=None,
        data_parallel=data_parallel,
    )


def stepped(policy: Any = "recompute_all", **config: Any) -> tuple[Compiled, list[Tensor]]:
    """One step of two blocks, and its gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    compiled = CompiledModule(model, config=CompileConfig(**config), planner=planner(policy))
    compiled(torch.randn(16, 8)).square().sum().backward()
    (capture,) = compiled.captures
    return capture, [p.grad for p in model.parameters() if p.grad is not None]


def names(capture: Compiled) -> list[str]:
    return [record.name for record in capture.records]


def texts(capture: Compiled) -> list[str]:
    return [str(trace) for trace in (capture.forward_traces[-1], *capture.backward_traces)]


def code(capture: Compiled) -> list[str]:
    """Without the first lines, which say how many milliseconds the last pass took."""
    return [text.partition("\n")[2] for text in texts(capture)]


@pytest.fixture(scope="module")
def plain() -> tuple[Compiled, list[Tensor]]:
    return stepped()


def assert_same_bits(actual: list[Tensor], expected: list[Tensor], what: object = None) -> None:
    assert len(actual) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), what


def test_the_names_that_settings_know_are_those_of_the_list_in_its_order() -> None:
    assert list(WHY_NEEDED) == NAMES
    assert tuple(step.name for step in STEPS if step.optional) == OPTIONAL


def test_planning_is_a_step_and_what_it_tries_are_steps_after_it() -> None:
    tried = [step.name for step in STEPS if step.is_tried]
    assert all(NAMES.index(name) > NAMES.index("plan") for name in tried)
    assert (tried[0], tried[-1]) == ("recompute", "delete_last_used")


def test_every_step_is_recorded_in_order(plain: tuple[Compiled, list[Tensor]]) -> None:
    capture, _ = plain
    assert names(capture) == ["capture", *NAMES]
    assert sum(r.milliseconds for r in capture.records) <= 1e3 * capture.seconds


def test_operations_are_counted_after_each_step(plain: tuple[Compiled, list[Tensor]]) -> None:
    capture, _ = plain
    after = {record.name: record.num_operations for record in capture.records}
    before_split = NAMES[: NAMES.index("split")]
    assert {len(after[name]) for name in before_split} == {1}
    assert {len(after[name]) for name in NAMES if name not in before_split} == {2}
    assert after["plan"] == after["regather"]
    assert after["recompute"] > after["plan"]
    traces = (capture.forward_traces[-1], *capture.backward_traces)
    assert after["run"] == tuple(len(trace.bound_symbols) for trace in traces)


def test_what_the_plan_tried_last_is_not_done_again() -> None:
    counts: Counter[str] = Counter()

    def counted(step: Step[State]) -> Step[State]:
        def do(state: State) -> State:
            counts[step.name] += 1
            return step.do(state)

        return replace(step, do=do)

    with patch.object(pipeline_module, "STEPS", tuple(map(counted, STEPS))):
        stepped()
    assert counts == Counter(NAMES)


def test_a_call_without_gradients_goes_the_same_way(tmp_path: Path) -> None:
    model = CompiledModule(Block().eval(), planner=planner("plan"))
    with torch.no_grad():
        model(torch.ones(2, 8))
    (capture,) = model.captures
    assert names(capture) == ["capture", *NAMES]
    assert {len(record.num_operations) for record in capture.records} == {1}


def test_each_step_leaves_a_file(plain: tuple[Compiled, list[Tensor]], tmp_path: Path) -> None:
    capture, gradients = stepped(trace_dir=str(tmp_path))
    (folder,) = (tmp_path / "rank0").iterdir()
    assert folder.name == "01-Sequential.forward"
    files = sorted(path.name for path in folder.iterdir())
    assert files == [f"{n:02}-{name}.py" for n, name in enumerate(["capture", *NAMES])]
    last = (folder / files[-2]).read_text()
    number = NAMES.index("delete_last_used") + 1
    assert last == f"# Nothing to do: as after {number}-delete_last_used.py.\n"
    deleted = (folder / f"{1 + NAMES.index('delete_last_used'):02}-delete_last_used.py").read_text()
    forward, backward = texts(capture)
    assert deleted == f"# The forward:\n\n{forward}\n\n\n# The backward:\n\n{backward}\n"
    assert code(capture) == code(plain[0])
    assert_same_bits(gradients, plain[1])
    stepped(trace_dir=str(tmp_path))
    assert sorted(path.name[:3] for path in folder.parent.iterdir()) == ["01-", "02-"]


def test_a_directory_that_cannot_be_written_is_one_warning(
    plain: tuple[Compiled, list[Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="thunder_memsave"):
        _, gradients = stepped(trace_dir=str(tmp_path / "file"))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"strategy.trace_dir: {tmp_path}/file/rank0/00-capture.py cannot be written (Not a directory), so there are no "
        "traces of Sequential.forward from there on; training goes on. Name a directory that this process may write "
        "to, with space."
    )
    assert_same_bits(gradients, plain[1])


@pytest.mark.parametrize("policy", ["plan", "recompute_all"])
def test_what_is_left_out_is_not_done_and_no_bit_changes(
    policy: str, plain: tuple[Compiled, list[Tensor]]
) -> None:
    capture, gradients = stepped(policy, leave_out=OPTIONAL)
    assert names(capture) == ["capture", *(name for name in NAMES if name not in OPTIONAL)]
    # On one device, without micro-batches, the other optional steps have nothing to do.
    assert code(capture) == code(stepped(policy, leave_out=("join_views", "write_in_place"))[0])
    assert_same_bits(gradients, plain[1])


Case = tuple[str | None, str, str, tuple[tuple[str, ...], ...]]
"""Policy, mode, what is done with gradients of micro-batches, and what is left out."""

SINGLY = (*((name,) for name in OPTIONAL), OPTIONAL)
FEW: tuple[Case, ...] = (
    (None, "zero3", "reduce_every", (("regather",),)),
    ("recompute_all", "zero3", "reduce_every", (OPTIONAL,)),
    ("plan", "zero2", "accumulate_unsharded", (OPTIONAL,)),
)
ALL: tuple[Case, ...] = tuple(
    (policy, mode, accumulate, SINGLY)
    for policy in (None, "plan", "recompute_all")
    for mode in ("zero2", "zero3")
    for accumulate in ("reduce_every", "accumulate_unsharded")
)


def check_on_ranks(rank: int, cases: tuple[Case, ...]) -> None:
    for policy, mode, accumulate, left_out in cases:
        expected = on_ranks(rank, policy, mode, accumulate, ())
        for names in left_out:
            actual = on_ranks(rank, policy, mode, accumulate, names)
            assert_same_bits(actual, expected, (policy, mode, names))


def on_ranks(
    rank: int, policy: Any, mode: Any, accumulate: Any, leave_out: tuple[str, ...]
) -> list[Tensor]:
    """Two micro-batches under autocast."""
    torch.manual_seed(0)
    model = Block()
    assert dist.group.WORLD is not None
    data_parallel = DataParallel(
        mode=mode,
        accumulate=accumulate,
        prefetch=10**6,
        bucket_bytes=200,
        group=dist.group.WORLD,
    )
    shard_module(model, data_parallel)
    module = CompiledModule(
        model,
        config=CompileConfig(leave_out=leave_out),
        data_parallel=data_parallel,
        planner=None if policy is None else planner(policy, data_parallel),
    )
    torch.manual_seed(1 + rank)
    keeps = accumulate == "accumulate_unsharded"
    for is_last in (False, True):
        with (
            module.unreduced.keeping(enabled=keeps and not is_last),
            torch.autocast("cpu", torch.bfloat16),
        ):
            module(torch.randn(4, 8)).square().sum().backward()
    (capture,) = module.captures
    assert bool(accumulated_names(capture.backward_traces[-1])) is keeps
    if policy is None and mode == "zero3":
        num_gathers = num_calls(capture.backward_traces[-1], "all_gather")
        assert (num_gathers > 0) is ("regather" not in leave_out)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(ALL, marks=pytest.mark.soak)], ids=["few", "all"]
)
def test_on_two_ranks_no_bit_changes_whatever_is_left_out(
    cases: tuple[Case, ...], tmp_path: Path
) -> None:
    run_on_ranks(check_on_ranks, 2, tmp_path / "rendezvous", cases)


def test_the_strategy_explains_the_steps_of_the_compilation_that_came_last(tmp_path: Path) -> None:
    strategy = ThunderMemsaveStrategy(trace_dir=str(tmp_path), leave_out=["schedule"])
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    with pytest.raises(RuntimeError, match=r"nothing was compiled yet.*Run one step first\."):
        strategy.explain(passes=True)
    models = [fabric.setup(Block()) for _ in range(2)]
    for model, num_rows in ((models[0], 3), (models[1], 3), (models[0], 4)):
        fabric.backward(model(torch.ones(num_rows, 8)).sum())
    assert len(list((tmp_path / "rank0").iterdir())) == 3
    captures = [c for m in strategy._modules for c in m.captures]
    last = max(captures, key=lambda each: each.number)
    assert "dimension 0" in last.capture.reason or "size" in last.capture.reason
    head, blank, columns, *rows = strategy.explain(passes=True).splitlines()
    assert head.startswith(f"forward: {len(NAMES)} steps in ")
    assert blank == ""
    assert columns.split() == ["step", "ms", "operations"]
    assert [row.split()[1] for row in rows] == [r.name for r in last.records]
    assert [row.split()[:2] for row in rows[:2]] == [["0", "capture"], ["1", "wrap_results"]]
    forward, backward = last.records[-1].num_operations
    assert f"  {forward} + {backward}  make what the call runs" in rows[-1]
    assert strategy.explain(passes=True) == explain_steps(captures)

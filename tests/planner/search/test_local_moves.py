from __future__ import annotations

from functools import cache

from harness.all_plans import model_of, task_of
from harness.training_graphs import llama_like, random_graph
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.linear.model import Model
from thunder_memsave.planner.search.local_moves import drop, improve, shrink
from thunder_memsave.planner.search.task import Task
from thunder_memsave.planner.work import Work


@cache
def layers() -> Model:
    graph = llama_like(6, tokens=64, width=64, hidden=160, kv=16)
    return model_of(graph, costs_us(graph, device("cpu")))


def shrunk(part: float, work: Work) -> Task:
    task = task_of(layers(), part=part)
    shrink(task, work)
    return task


def test_shrinking_finds_a_smaller_plan() -> None:
    task = shrunk(0.0, Work())
    assert task.smallest.peak_bytes < 0.99 * task.free.peak_bytes


def test_shrinking_stops_at_once_where_enough_is_known_or_the_work_is_over() -> None:
    for task in (shrunk(1.0, Work()), shrunk(0.0, Work(until=0.0))):
        assert task.smallest.peak_bytes == task.free.peak_bytes


def test_a_plan_that_fits_is_found_by_giving_up_storages_and_gets_faster_by_other_steps() -> None:
    task = task_of(layers(), part=0.95)
    drop(task, Work())
    dropped = task.best
    assert dropped is not None
    improve(task, Work())
    assert task.best is not None
    assert task.best.recompute_us < dropped.recompute_us


def test_the_excess_is_what_the_moments_of_a_plan_sum_to_above_a_target() -> None:
    for seed in range(12):
        graph = random_graph(seed)
        evaluate = task_of(model_of(graph, [1.0] * len(graph.ops))).evaluate
        found = evaluate(frozenset(evaluate.needs.storages))
        profile = found.profile
        over = profile.peak_bytes // 2
        moments = [
            *profile.step_peak_bytes,
            profile.between_peak_bytes,
            max(profile.update_peak_bytes, profile.live_bytes[-1]),
        ]
        expected = sum(n - over for n in moments if n > over)
        assert evaluate.excess_bytes(found.keep, over_bytes=over) == expected

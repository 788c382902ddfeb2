from __future__ import annotations

from functools import cache

from harness.all_plans import model_of, task_of
from harness.training_graphs import llama_like, random_graph
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.linear.model import Model
from thunder_memsave.planner.search.local_moves import drop, improve
from thunder_memsave.planner.work import Work


@cache
def layers() -> Model:
    graph = llama_like(6, tokens=64, width=64, hidden=160, kv=16)
    return model_of(graph, costs_us(graph, device("cpu")))


def test_while_nothing_fits_the_smallest_plan_gets_smaller() -> None:
    task = task_of(layers(), part=0.0)
    improve(task, Work())
    assert task.smallest.peak_bytes < 0.99 * task.start.peak_bytes


def test_without_work_the_smallest_plan_stays() -> None:
    task = task_of(layers(), part=0.0)
    improve(task, Work(until=0.0))
    assert task.smallest.peak_bytes == task.start.peak_bytes


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

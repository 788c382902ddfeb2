from __future__ import annotations

import time
from functools import cache

from harness.training_graphs import llama_like, random_graph
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import StepMemory, TrainingGraph
from thunder_memsave.planner.linear.peak_program import PeakModel
from thunder_memsave.planner.search.evaluate import Evaluator
from thunder_memsave.planner.search.local_moves import shrink

STATE_BYTES = 16


def evaluator(graph: TrainingGraph) -> Evaluator:
    return Evaluator(
        needs=needs(graph),
        costs_us=costs_us(graph, device("cpu")),
        memory=StepMemory(),
        generator_state_bytes=STATE_BYTES,
    )


@cache
def layers() -> TrainingGraph:
    return llama_like(6, tokens=64, width=64, hidden=160, kv=16)


def shrunk(enough_bytes: float, seconds: float = 60.0) -> Evaluator:
    evaluate = evaluator(layers())
    model = PeakModel(
        needs=evaluate.needs,
        costs_us=evaluate.costs_us,
        memory=StepMemory(),
        generator_state_bytes=STATE_BYTES,
    )
    evaluate(frozenset(evaluate.needs.storages))
    shrink(
        model,
        evaluate,
        enough_bytes=enough_bytes,
        deadline_s=time.thread_time() + seconds,
    )
    return evaluate


def test_shrinking_finds_a_smaller_plan() -> None:
    all_kept = evaluator(layers())(frozenset(needs(layers()).storages)).peak_bytes
    assert shrunk(0).smallest.peak_bytes < 0.99 * all_kept


def test_shrinking_stops_at_once_where_enough_is_known_or_the_time_is_over() -> None:
    all_kept = evaluator(layers())(frozenset(needs(layers()).storages)).peak_bytes
    assert shrunk(all_kept).smallest.peak_bytes == all_kept
    assert shrunk(0, seconds=-1.0).smallest.peak_bytes == all_kept


def test_the_excess_is_what_the_moments_of_a_plan_sum_to_above_a_target() -> None:
    for seed in range(12):
        evaluate = evaluator(random_graph(seed))
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

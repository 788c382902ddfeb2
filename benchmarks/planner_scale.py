"""Measures how long plans for many layers take, and how far from the bound they are.

    PYTHONPATH=tests OMP_NUM_THREADS=1 .venv/bin/python benchmarks/planner_scale.py --layers 80

The graph is a Llama's of 70B shape, as Thunder decomposes it (tests/harness/training_graphs.py), with costs of an H200.
Time is CPU time of `solve`. The gap is to the proven lower bound on all plans: the best plan may be no faster.
"""

from __future__ import annotations

import argparse
import time

from harness.training_graphs import llama_like
from thunder_memsave.errors import BudgetError
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Plan, TrainingGraph
from thunder_memsave.planner.search.solve import solve


def main() -> None:
    """Print one line for each fraction of the peak with all kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--parts", type=float, nargs="+", default=[0.9, 0.7, 0.5, 0.35, 0.25])
    options = parser.parse_args()
    graph = llama_like(options.layers)
    costs = costs_us(graph, device("h200"))
    forward_us = sum(costs[: graph.num_forward])
    kept, seconds = timed(graph, costs, None)
    print(f"{len(graph.ops)} operations; {kept.saved_bytes / 2**30:.1f} GiB kept, {seconds:.1f} s")
    for part in options.parts:
        budget = int(part * kept.predicted_peak_bytes)
        try:
            plan, seconds = timed(graph, costs, budget)
        except BudgetError as error:
            print(f"{part:.0%}: {error}")
            continue
        again = plan.recompute_us / forward_us
        print(
            f"{part:.0%}: peak {plan.predicted_peak_bytes / 2**30:.1f} GiB, {again:.1%} of forward computed again, "
            f"gap {plan.gap:.1%}, found by {plan.found_by}, {seconds:.1f} s"
        )


def timed(graph: TrainingGraph, costs: tuple[float, ...], budget: int | None) -> tuple[Plan, float]:
    """Return a plan, and the CPU seconds that it took."""
    start = time.process_time()
    plan = solve(graph, budget_bytes=budget, costs_us=costs)
    return plan, time.process_time() - start


if __name__ == "__main__":
    main()

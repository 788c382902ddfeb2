"""Measure what each of the planner's searches is good for, by leaving it out.

    PYTHONPATH=benchmarks OMP_NUM_THREADS=1 .venv/bin/python benchmarks/planner_ablation.py FOLDER RESULT

FOLDER has the graphs of `recorded_graphs.py`. Each is planned for eight budgets between the smallest and that of
keeping everything, and for the smallest itself, with two limits on work. Then searches are left out one at a time,
those that found the fewest plans first, with the smaller limit and every second budget. One is not needed if without it
no step gets 0.5 % slower, and no smallest budget 1 % larger; those after it are then measured without it. Answers are
kept in FOLDER, so that a run that was ended goes on. RESULT gets `.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import scipy  # type: ignore[import-untyped]
from recorded_graphs import Asked

from thunder_memsave.errors import BudgetError
from thunder_memsave.planner.linear.cut_program import MomentProgram
from thunder_memsave.planner.search import by_moments, local_moves
from thunder_memsave.planner.search.solve import SEARCHES, Search, solve
from thunder_memsave.planner.search.task import Task
from thunder_memsave.planner.work import Work


def _relaxed(*args: Any, integer: bool, **options: Any) -> MomentProgram:
    return MomentProgram(*args, integer=False, **options)


_PATCHES: Mapping[str, tuple[Any, str, Any]] = {
    "integers": (by_moments, "MomentProgram", _relaxed),
    "runs": (by_moments._Rounds, "_close", lambda rounds, found: False),
    "layers": (by_moments, "find_blocks", lambda needs, costs_us: []),
    "exchange": (local_moves, "_given_up", lambda task, best, *rest: best),
}
"""What to put in the place of parts of searches to leave them out; `exchange` is of improve, the others of moments."""
_PARTS = (0.02, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.93)
_LIMITS = (1.0, 3.0)
_MOST_SLOWER, _MOST_LARGER = 0.005, 0.01


@dataclass(frozen=True)
class Answer:
    """A plan, or the smallest one."""

    us: float
    peak_bytes: int
    fits: bool
    found_by: str
    ran: tuple[str, ...]
    cpu_s: float


@dataclass(frozen=True)
class Round:
    """A search that was left out, besides those before."""

    name: str
    questions: int
    slower: float
    """The largest rise of a step's time, as a fraction of it."""
    slower_at: str
    larger: float
    """The largest rise of a smallest budget, as a fraction of it."""
    larger_at: str
    mean_slower: float
    faster: float
    cpu_s: float
    cpu_s_with: float

    @property
    def goes(self) -> bool:
        """True if plans are as good without it."""
        return self.slower < _MOST_SLOWER and self.larger < _MOST_LARGER


class Answers:
    """Asks the planner, and remembers."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "answers.json"
        stored = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._known = {key: Answer(**{**a, "ran": tuple(a["ran"])}) for key, a in stored.items()}
        self.graphs = {path.stem: _load(path) for path in sorted(folder.glob("*.pickle"))}
        self._all_kept: dict[str, int] = {}

    def of(self, name: str, budget_bytes: int, limit: float, without: Iterable[str]) -> Answer:
        """Return the answer; a search that had nothing to do may be left out without asking again."""
        without = sorted(without)
        for fewer in ([], *([w for w in without if w != left] for left in without)):
            known = self._known.get(_key(name, budget_bytes, limit, fewer))
            if known is not None and not set(without) - set(fewer) & set(known.ran):
                return known
        key = _key(name, budget_bytes, limit, without)
        if key not in self._known:
            self._known[key] = ask(self.graphs[name], budget_bytes, limit, without)
            self._file.write_text(json.dumps({k: asdict(a) for k, a in self._known.items()}))
        return self._known[key]

    def budgets(self, name: str) -> list[int]:
        """Return eight budgets."""
        smallest = self.of(name, 1, _LIMITS[-1], ()).peak_bytes
        kept = self.all_kept_bytes(name)
        return [int(smallest + part * (kept - smallest)) for part in _PARTS]

    def all_kept_bytes(self, name: str) -> int:
        """Return the peak of keeping all."""
        if name not in self._all_kept:
            self._all_kept[name] = _solve(self.graphs[name], None).predicted_peak_bytes
        return self._all_kept[name]

    def step_us(self, name: str, answer: Answer) -> float:
        """Return the time of forward, backward and what is recomputed."""
        return sum(self.graphs[name].costs_us) + answer.us


def ask(asked: Asked, budget_bytes: int, limit: float, without: Sequence[str]) -> Answer:
    """Ask for a plan without some searches."""
    ran: list[str] = []
    searches = [replace(s, run=_noting(s, ran)) for s in SEARCHES if s.name not in without]
    start = time.thread_time()
    try:
        with ExitStack() as stack:
            for part in _PATCHES.keys() & set(without):
                stack.enter_context(mock.patch.object(*_PATCHES[part]))
            plan = _solve(asked, budget_bytes, searches=searches, time_limit_s=limit)
        fits = True
    except BudgetError as error:
        plan, fits = error.smallest_plan, False
    seconds = time.thread_time() - start
    names = tuple(dict.fromkeys([*ran, *(_PATCHES if ran else ())]))
    return Answer(plan.recompute_us, plan.predicted_peak_bytes, fits, plan.found_by, names, seconds)


def _noting(search: Search, ran: list[str]) -> Callable[[Task, Work], None]:
    def run(task: Task, work: Work) -> None:
        ran.append(search.name)
        search.run(task, work)

    return run


def _solve(asked: Asked, budget_bytes: int | None, **options: Any) -> Any:
    return solve(
        asked.graph,
        budget_bytes=budget_bytes,
        costs_us=asked.costs_us,
        memory=asked.memory,
        pinned=asked.pinned,
        generator_state_bytes=asked.generator_state_bytes,
        **options,
    )


def leave_out(answers: Answers, name: str, gone: Sequence[str], limit: float) -> Round:
    """Compare answers without a search to those with it."""
    slower: list[tuple[float, str]] = []
    larger: list[tuple[float, str]] = []
    seconds = [0.0, 0.0]
    for graph in answers.graphs:
        for budget_bytes in (1, *answers.budgets(graph)[::2]):
            before = answers.of(graph, budget_bytes, limit, gone)
            after = answers.of(graph, budget_bytes, limit, [*gone, name])
            seconds = [seconds[0] + before.cpu_s, seconds[1] + after.cpu_s]
            where = f"{graph} {budget_bytes / answers.all_kept_bytes(graph):.0%}"
            if before.fits and after.fits:
                ratio = answers.step_us(graph, after) / answers.step_us(graph, before)
                slower.append((ratio - 1.0, where))
            else:
                larger.append((after.peak_bytes / before.peak_bytes - 1.0, where))
    worst, largest = max(slower, default=(0.0, "")), max(larger, default=(0.0, ""))
    return Round(
        name=name,
        questions=len(slower) + len(larger),
        slower=worst[0],
        slower_at=worst[1],
        larger=largest[0],
        larger_at=largest[1],
        mean_slower=sum(s for s, _ in slower) / max(1, len(slower)),
        faster=-min(slower, default=(0.0, ""))[0],
        cpu_s=seconds[1],
        cpu_s_with=seconds[0],
    )


def rounds(answers: Answers, names: Sequence[str], limit: float) -> list[Round]:
    """Leave out one search after the other; those without which plans are as good stay out."""
    found: list[Round] = []
    for name in names:
        gone = [r.name for r in found if r.goes]
        found.append(leave_out(answers, name, gone, limit))
        print(_row(found[-1]), flush=True)
    return found


def by_use(answers: Answers, names: Iterable[str]) -> list[tuple[str, int]]:
    """Return how many of all plans each search found, the fewest first."""
    found = Counter(
        answers.of(graph, budget_bytes, limit, ()).found_by
        for graph in answers.graphs
        for limit in _LIMITS
        for budget_bytes in (1, *answers.budgets(graph))
    )
    return sorted(((name, found[name]) for name in names), key=lambda pair: pair[1])


def report(answers: Answers, used: Sequence[tuple[str, int]], done: Sequence[Round]) -> str:
    """Return the result as Markdown."""
    ops = {name: len(asked.graph.ops) for name, asked in answers.graphs.items()}
    table = [
        f"# Which searches the planner needs, {date.today()}",
        "",
        f"{len(ops)} graphs of {min(ops.values())} to {max(ops.values())} operations; budgets at "
        f"{', '.join(f'{part:.0%}' for part in _PARTS)} of the way from the smallest to that of keeping all; limits on "
        f"work {', '.join(map(str, _LIMITS))}. Python {platform.python_version()}, scipy {scipy.__version__}, "
        f"{platform.machine()}, one thread. A search goes where no step gets {_MOST_SLOWER:.1%} slower and no smallest "
        f"budget {_MOST_LARGER:.0%} larger without it; searches that went are left out of the rows below theirs. "
        f"Rows have limit {_LIMITS[0]} and every second budget.",
        "",
        "Plans found by each search: "
        + ", ".join(f"{name} {number}" for name, number in used)
        + ".",
        "",
        "| left out | worst step | at | mean step | best step | smallest budget | at | CPU s | before | |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(_row, done),
        "",
        "Graphs: " + ", ".join(f"{name} {number}" for name, number in ops.items()) + " operations.",
        "",
    ]
    return "\n".join(table)


def _row(done: Round) -> str:
    return (
        f"| {done.name} | {done.slower:+.2%} | {done.slower_at} | {done.mean_slower:+.3%} | {-done.faster:+.2%} | "
        f"{done.larger:+.2%} | {done.larger_at} | {done.cpu_s:.0f} | {done.cpu_s_with:.0f} | "
        f"{'goes' if done.goes else 'stays'} |"
    )


def _key(name: str, budget_bytes: int, limit: float, without: Iterable[str]) -> str:
    return f"{name} {budget_bytes} {limit} {','.join(sorted(without))}"


def _load(path: Path) -> Asked:
    loaded: Callable[[bytes], Asked] = pickle.loads
    return loaded(path.read_bytes())


def main() -> None:
    """Print each row as soon as it is known, and write all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    answers = Answers(options.folder)
    used = by_use(answers, [s.name for s in SEARCHES])
    names = [*sorted(_PATCHES), *(name for name, _ in used)]
    done = rounds(answers, names, _LIMITS[0])
    options.result.with_suffix(".md").write_text(report(answers, used, done))
    rows = {"used": dict(used), "rounds": [asdict(r) for r in done]}
    options.result.with_suffix(".json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

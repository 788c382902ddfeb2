"""Trains plain modules such as users write beside eager PyTorch, and writes what becomes of each.

    make plain-modules                              # all, with every check: half an hour
    python benchmarks/plain_modules.py --only ScatterMean --checks train --save plain.md

The modules are in `benchmarks/plain_kinds`, by what is special about them. Each takes two steps of SGD, and what the
strategy computes and leaves behind must be eager's: outputs, gradients of parameters and of inputs, inputs changed in
place, buffers, parameters, attributes of Python's own types, and what is printed. Where random numbers are drawn, one
seed must give one result, gradients must be those of finite differences with the same numbers, and means over seeds
eager's.
Beside training: evaluation, half of the budget between the smallest and that of keeping everything with the
same bits, and zero3 on two ranks. What is in the JSON file already, with all checks, is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from beside_eager import NUM_RANKS
from forked import Fields, Forked, results
from plain_checks import CHECKS, CLOSE, Outcome, checked, checked_on_rank
from plain_kinds import PLAIN

from harness.fabric import free_port

_WORST = ("crash", "hangs", "wrong", "refused", "pieces", "pass")


def outcome_of(checks: tuple[str, ...], name: str) -> Fields:
    """Make the checks; those on two ranks in two further processes, which are there before anything is computed."""
    port = free_port()
    ranks = [
        Forked(partial(_on_rank, name, rank, port), waits=True)
        for rank in range(NUM_RANKS if "zero3" in checks else 0)
    ]
    outcome = checked(name, checks)
    goes_on = "not here" not in outcome.states
    for rank in ranks:
        rank.go_on(goes_on)
    found = [Outcome(**rank.result()) for rank in ranks if goes_on]
    if found:
        worst = min(found, key=lambda o: _WORST.index(o.states["zero3"]))
        outcome.states |= worst.states
        outcome.reasons |= worst.reasons
        outcome.seconds = round(outcome.seconds + worst.seconds, 1)
    return asdict(outcome)


def _on_rank(name: str, rank: int, port: int) -> Fields:
    return asdict(checked_on_rank(name, rank, port))


def outcomes(names: Sequence[str], checks: tuple[str, ...], *, workers: int) -> Iterator[Outcome]:
    """Yield the outcome of each module, as they end."""

    def without(name: str, is_late: bool, reason: str, seconds: float) -> Fields:
        state = "hangs" if is_late else "crash"
        states, reasons = dict.fromkeys(checks, state), dict.fromkeys(checks, reason)
        group = PLAIN[name].group
        return asdict(
            Outcome(name=name, group=group, states=states, reasons=reasons, seconds=seconds)
        )

    found = results(names, partial(outcome_of, checks), workers=workers, without=without)
    return (Outcome(**fields) for fields in found)


def table(found: Sequence[Outcome], checks: Sequence[str], *, num_left: int = 0) -> str:
    """Return the Markdown: counts, the groups, and a row for each check that does not simply pass.

    Args:
        found: What was run.
        checks: The checks that were made.
        num_left: Number of modules that were not run.
    """
    wrong = sum("wrong" in o.states.values() for o in found)
    crashed = sum(bool({"crash", "hangs"} & set(o.states.values())) for o in found)
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "lightning", "lightning-thunder"))
    lines = [
        f"Of {len(found)} plain modules, {wrong} give wrong numbers, {crashed} crash or hang, and "
        f"{sum(o.runs for o in found)} run, {sum(_whole(o) for o in found)} of them as one graph in every check; "
        f"{num_left} were not run. Numbers differ from eager's by at most {CLOSE:.0e} of the largest one of their "
        "tensor, or are as near to float64's as eager's are; bits under a budget do not differ. What cannot be one "
        f"graph runs in pieces, under a budget too. {packages}, CPU.",
        "",
        "| check | " + " | ".join(_WORST[::-1]) + " |",
        "|---|" + "---|" * len(_WORST),
    ]
    for check in checks:
        counts = Counter(o.states.get(check, "") for o in found)
        lines.append(f"| {check} | " + " | ".join(str(counts[s]) for s in _WORST[::-1]) + " |")
    lines += ["", "| group | modules | run | one graph |", "|---|---|---|---|"]
    for group in dict.fromkeys(o.group for o in found):
        own = [o for o in found if o.group == group]
        lines.append(
            f"| {group} | {len(own)} | {sum(o.runs for o in own)} | {sum(_whole(o) for o in own)} |"
        )
    lines += ["", "**As one graph:** " + ", ".join(o.name for o in found if _whole(o)) + ".", ""]
    lines += ["| module | check | | reason |", "|---|---|---|---|"]
    for state in ("not here", *_WORST[:-1]):
        for o in found:
            rows = _rows(o, state)
            lines += [f"| {o.name} | {c} | {state} | {r} |" for c, r in rows]
    return "\n".join(lines) + "\n"


def _whole(outcome: Outcome) -> bool:
    return set(outcome.states.values()) == {"pass"}


def _rows(outcome: Outcome, state: str) -> list[tuple[str, str]]:
    """Return the checks that ended so, those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for check, found in outcome.states.items():
        if found == state:
            reason = outcome.reasons.get(check, "").replace("|", "/")
            short = reason.partition("compiled: ")[2] or reason if state == "pieces" else reason
            by_reason.setdefault(short.partition(" (strategy.fullgraph")[0], []).append(check)
    return [(", ".join(checks), reason) for reason, checks in by_reason.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", help="names of modules or of groups; all by default")
    parser.add_argument("--checks", nargs="*", choices=CHECKS, default=CHECKS)
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--save", type=Path, help="a Markdown file; a JSON file is kept beside it")
    arguments = parser.parse_args()
    wanted = set(arguments.only or PLAIN)
    groups = {p.group for p in PLAIN.values()}
    if unknown := sorted(wanted - {*PLAIN, *groups}):
        print(f"there is no {', '.join(unknown)} among {', '.join([*sorted(groups), *PLAIN])}")
        return 2
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    kept = arguments.save and arguments.save.with_suffix(".json")
    found = _stored(kept, arguments.checks)
    here = {o.name for o in found}
    names = [n for n, p in PLAIN.items() if {n, p.group} & wanted and n not in here]
    for number, outcome in enumerate(
        outcomes(names, tuple(arguments.checks), workers=arguments.workers), 1
    ):
        found.append(outcome)
        for check, state in outcome.states.items():
            if state not in ("pass", "pieces"):
                print(f"  {outcome.name} {check} {state}: {outcome.reasons.get(check, '')}")
        states = " ".join(outcome.states.values())
        print(f"[{number}/{len(names)}] {outcome.name}: {states}, {outcome.seconds} s", flush=True)
        if kept is not None:
            _save(found, arguments.save, arguments.checks, num_left=len(names) - number)
    counts = Counter(s for o in found for s in o.states.values())
    print(", ".join(f"{n} {state}" for state, n in counts.most_common()))
    return int(any(counts[s] for s in ("wrong", "crash", "hangs")))


def _stored(path: Path | None, checks: Sequence[str]) -> list[Outcome]:
    """Read what an earlier run found with all of these checks, of modules that are still there."""
    if path is None or not path.exists():
        return []
    found = [Outcome(**row) for row in json.loads(path.read_text())]
    return [
        o
        for o in found
        if o.name in PLAIN and ("not here" in o.states or set(checks) <= o.states.keys())
    ]


def _save(found: list[Outcome], path: Path, checks: Sequence[str], *, num_left: int) -> None:
    order = list(PLAIN)
    found.sort(key=lambda o: order.index(o.name))
    rows = [asdict(o) for o in found]
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    path.write_text(table(found, checks, num_left=num_left))


if __name__ == "__main__":
    sys.exit(main())

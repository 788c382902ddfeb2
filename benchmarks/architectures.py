"""Trains small models of architectures that nobody here wrote, beside eager, and writes what becomes of each.

    make architectures                                   # all, with every check: hours on 2 cores
    python benchmarks/architectures.py --only llama T5 --checks train --save architectures.md

These are all entries of transformers' mapping of causal language models, and models of other kinds, of transformers and
diffusers. Each is made small, without dropout, and must, by the strategy, train with eager's loss and gradients,
evaluate with eager's outputs, keep its bits under half of the budget between the smallest and that of keeping
everything, and train with the gradients of both batches under zero3 on two ranks. Each runs in processes of its own
with a limit of time and memory. What is in the JSON file already, with all checks, is not run again.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers
from architecture_checks import (
    CHECKS,
    CLOSE,
    Outcome,
    checked,
    checked_on_rank,
)
from beside_eager import NUM_RANKS
from forked import Fields, Forked, results
from toy_architectures import CAUSAL, OTHERS

from harness.fabric import free_port


def outcome_of(checks: tuple[str, ...], name: str) -> Fields:
    """Make the checks; those on two ranks in two further processes, which are there before anything is computed."""
    port = free_port()
    ranks = [
        Forked(partial(_on_rank, name, rank, port), waits=True)
        for rank in range(NUM_RANKS if "zero3" in checks else 0)
    ]
    outcome = checked(name, checks)
    goes_on = outcome.state == "trains"
    for rank in ranks:
        rank.go_on(goes_on)
    for found in [Outcome(**rank.result()) for rank in ranks if goes_on]:
        outcome.seconds = round(outcome.seconds + found.seconds / NUM_RANKS, 1)
        if found.state != "trains" and outcome.state == "trains":
            outcome.state, outcome.check, outcome.reason = found.state, "zero3", found.reason
    if ranks and outcome.state == "trains":
        outcome.passed.append("zero3")
    return asdict(outcome)


def _on_rank(name: str, rank: int, port: int) -> Fields:
    return asdict(checked_on_rank(name, rank, port))


def outcomes(names: Sequence[str], checks: tuple[str, ...], *, workers: int) -> Iterator[Outcome]:
    """Yield the outcome of each architecture, as they end."""
    found = results(names, partial(outcome_of, checks), workers=workers, without=_without)
    return (Outcome(**fields) for fields in found)


def _without(name: str, is_late: bool, reason: str, seconds: float) -> Fields:
    state = "hangs" if is_late else "fails"
    return asdict(Outcome(name=name, state=state, reason=reason, seconds=seconds))


def table(found: Sequence[Outcome], checks: Sequence[str], *, num_left: int = 0) -> str:
    """Return the Markdown: what passes everything in one line, and a row for each other with its reason.

    Args:
        found: What was run.
        checks: The checks that were made.
        num_left: Number of models that were not run.
    """
    here = [o for o in found if o.state != "not here"]
    passed = sorted((o.name for o in here if o.state == "trains"), key=str.casefold)
    causal = [o for o in here if o.name in CAUSAL]
    packages = ("torch", "transformers", "diffusers", "lightning-thunder")
    counts = ", ".join(f"{c}: {sum(c in o.passed for o in here)}" for c in checks)
    lines = [
        f"{len(passed)} of the {len(here)} models that eager trains at this size pass every check; of the "
        f"{len(causal)} causal language models among them {sum(o.state == 'trains' for o in causal)}. Numbers differ "
        f"from eager's by at most {CLOSE:.0e} of the largest one of their tensor; bits under a budget do not differ. "
        f"{len(found) - len(here)} others eager does not train so, and {num_left} were not run. "
        f"{', '.join(map(_version, packages))}, CPU.",
        "",
        f"Passed, by check (those after one that fails are not made): {counts}.",
        "",
        "**Pass:** " + ", ".join(passed) + ".",
        "",
        "| model | check | | reason |",
        "|---|---|---|---|",
    ]
    for state in ("differs", "fails", "hangs", "refused", "not here"):
        for o in sorted((o for o in found if o.state == state), key=lambda o: o.name):
            lines.append(f"| {o.name} | {o.check} | {state} | {o.reason.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def _stored(path: Path | None, checks: Sequence[str]) -> list[Outcome]:
    """Read what an earlier run found with all of these checks."""
    if path is None or not path.exists():
        return []
    found = [Outcome(**row) for row in json.loads(path.read_text())]
    return [o for o in found if o.state != "trains" or set(checks) <= set(o.passed)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", help="names of architectures; all by default")
    parser.add_argument("--checks", nargs="*", choices=CHECKS, default=CHECKS)
    parser.add_argument("--workers", type=int, default=2, help="processes side by side")
    parser.add_argument("--save", type=Path, help="a Markdown file; a JSON file is kept beside it")
    arguments = parser.parse_args()
    names = arguments.only or [*CAUSAL, *OTHERS]
    if unknown := sorted(set(names) - {*CAUSAL, *OTHERS}):
        print(
            f"there is no {', '.join(unknown)} among {', '.join(OTHERS)} and transformers' causal models"
        )
        return 2
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kept = arguments.save and arguments.save.with_suffix(".json")
    found = _stored(kept, arguments.checks)
    names = [name for name in names if name not in {o.name for o in found}]
    for number, outcome in enumerate(
        outcomes(names, tuple(arguments.checks), workers=arguments.workers), 1
    ):
        found.append(outcome)
        reason = f" {outcome.check}: {outcome.reason[:150]}" if outcome.reason else ""
        print(f"[{number}/{len(names)}] {outcome.name}: {outcome.state}{reason}", flush=True)
        if kept is not None:
            rows = [asdict(o) for o in sorted(found, key=lambda o: o.name)]
            kept.write_text(json.dumps(rows, indent=1))
            left = len(names) - number
            arguments.save.write_text(table(found, arguments.checks, num_left=left))
    counts = Counter(o.state for o in found)
    print(", ".join(f"{n} {state}" for state, n in counts.most_common()))
    return int(any(o.state in ("differs", "fails", "hangs") for o in found))


if __name__ == "__main__":
    sys.exit(main())

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
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers
from architecture_checks import (
    CHECKS,
    CLOSE,
    NUM_RANKS,
    Outcome,
    checked,
    checked_on_rank,
)
from toy_architectures import CAUSAL, OTHERS

from harness.fabric import free_port

LIMIT_S = 600.0
MEMORY_BYTES = 10 * 2**30


def outcome_of(name: str, checks: tuple[str, ...]) -> Outcome:
    """Make the checks; those on two ranks in two further processes, which are there before anything is computed."""
    port = free_port()
    ranks = [
        Forked(partial(checked_on_rank, name, rank, port), waits=True)
        for rank in range(NUM_RANKS if "zero3" in checks else 0)
    ]
    outcome = checked(name, checks)
    goes_on = outcome.state == "trains"
    for rank in ranks:
        rank.go_on(goes_on)
    for found in [rank.outcome() for rank in ranks if goes_on]:
        outcome.seconds = round(outcome.seconds + found.seconds / NUM_RANKS, 1)
        if found.state != "trains" and outcome.state == "trains":
            outcome.state, outcome.check, outcome.reason = found.state, "zero3", found.reason
    if ranks and outcome.state == "trains":
        outcome.passed.append("zero3")
    return outcome


class Forked:
    """A process that computes an outcome, and the pipe that it comes through."""

    def __init__(self, run: Callable[[], Outcome], *, waits: bool = False) -> None:
        self.pipe, write = os.pipe()
        signalled, self._go = os.pipe()
        self.start = time.monotonic()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            os.close(signalled)
            if not waits:
                self.go_on(True)
            return
        os.close(self.pipe)
        os.close(self._go)
        if not waits:
            os.setsid()  # what it forks ends with it
        if os.read(signalled, 1) == b"y":
            _run_quietly(run, write)
        os._exit(0)

    def go_on(self, goes_on: bool) -> None:
        """Let the process begin, or end."""
        os.write(self._go, b"y" if goes_on else b"n")
        os.close(self._go)

    def outcome(self) -> Outcome:
        """Wait for the outcome.

        Raises:
            ValueError: the process ended without one.
        """
        with os.fdopen(self.pipe) as pipe:
            text = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        if not text:
            raise ValueError(f"its process ended with {os.waitstatus_to_exitcode(status)}")
        return Outcome(**json.loads(text))


def _run_quietly(run: Callable[[], Outcome], write: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    with os.fdopen(write, "w") as pipe:
        pipe.write(json.dumps(asdict(run())))


def outcomes(names: Sequence[str], checks: tuple[str, ...], *, workers: int) -> Iterator[Outcome]:
    """Yield the outcome of each architecture, as they end."""
    waiting = list(names)
    running: dict[int, tuple[str, Forked]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            forked = Forked(partial(outcome_of, name, checks))
            running[forked.pipe] = name, forked
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for pipe, (name, forked) in list(running.items()):
            seconds = time.monotonic() - forked.start
            if is_late := pipe not in ready and seconds > LIMIT_S:
                os.killpg(forked.pid, signal.SIGKILL)
            if pipe in ready or is_late:
                del running[pipe]
                yield _ended(name, forked, is_late=is_late, seconds=round(seconds, 1))


def _ended(name: str, forked: Forked, *, is_late: bool, seconds: float) -> Outcome:
    try:
        return forked.outcome()
    except ValueError as error:
        reason = f"it had not ended after {LIMIT_S:.0f} s" if is_late else str(error)
        state = "hangs" if is_late else "fails"
        return Outcome(name=name, state=state, reason=reason, seconds=seconds)


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

"""Runs Lightning's own examples and tests of Fabric, and litgpt's LoRA, with our strategy put in, beside `ddp`.

    python benchmarks/lightning_fabric.py --lightning PATH --litgpt PATH --save lightning_fabric.md

PATH is a checkout of Lightning-AI/pytorch-lightning or Lightning-AI/litgpt; nothing of them is kept here. The scripts
run unchanged in processes of their own: `foreign/injected.py` replaces the strategy, the accelerator and the number of
processes in each `Fabric(...)`, `foreign/stand_ins.py` puts random data in the place of downloads. All losses that
`fabric.backward` gets must equal those of `ddp`. What is in the JSON file already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from foreign.examples import EXAMPLES, LITGPT, NOT_RUN, Example
from foreign.litgpt_lora import CONVERTED, MERGED
from foreign.own_tests import FILES, TestsOutcome, run_tests
from foreign.stand_ins import is_here

CLOSE = 1e-5
"""Largest difference of a loss, relative to it: `ddp` adds up gradients in buckets, in another order."""
CLOSE_WEIGHTS = 1e-5
"""Largest difference of a merged weight: six steps of AdamW, whose quotients near zero amplify those roundings."""
LIMIT_S = 900
REFERENCE, OURS = "ddp", ("thunder_memsave", "thunder_memsave:zero3")


@dataclass
class Row:
    """One script on a number of processes, with our strategy beside `ddp`."""

    name: str
    num_ranks: int
    strategy: str
    state: str
    """`equal`, `differs`, `fails`, `cannot`, or `trains`: equal, and then stopped by an error that the note gives."""
    num_losses: int = 0
    difference: float = 0.0
    num_graphs: int = 0
    seconds: float = 0.0
    note: str = ""


def compared(example: Example, num_ranks: int, checkout: Path, work: Path) -> list[Row]:
    """Run a script with `ddp` and with our strategy, and compare."""
    missing = [package for package in example.needs if not is_here(package)]
    if missing:
        note = f"needs {', '.join(missing)}, which is not installed"
        return [Row(example.name, num_ranks, OURS[0], "cannot", note=note)]
    expected = _run(example, REFERENCE, num_ranks, checkout, work)
    strategies = (*OURS, *example.also) if num_ranks > 1 else OURS[:1]
    return [
        _row(example, strategy, expected, _run(example, strategy, num_ranks, checkout, work))
        for strategy in strategies
    ]


def _row(example: Example, strategy: str, expected: list[Any], found: list[Any]) -> Row:
    row = Row(example.name, len(found), strategy, "equal", note=example.note)
    for name, outcomes in ((REFERENCE, expected), (strategy, found)):
        errors = [o["error"].strip().splitlines()[-1] for o in outcomes if o["error"]]
        if errors and outcomes is found and _is_trained(expected, found, example, errors[0]):
            row.state, row.note = "trains", f"{row.note} {example.why_refused}"
        elif errors:
            row.state = "fails" if outcomes is found else "cannot"
            row.note = f"{name}: {errors[0][:300]}"
            return row
    row.num_graphs, row.seconds = found[0]["graphs"], found[0]["seconds"]
    row.num_losses = sum(len(o["losses"]) for o in found)
    row.difference = max(map(_difference, expected, found))
    weights = _difference_of_files(expected[0]["folder"], found[0]["folder"])
    if weights is not None:
        row.note += f" Merged and converted weights differ by at most {weights:.0e}."
    if not row.difference <= CLOSE or (weights or 0.0) > CLOSE_WEIGHTS:
        row.state = "differs"
    return row


def _difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """Return the largest difference of a loss, relative to it; infinite if there are more or fewer."""
    losses: list[list[float]] = [expected["losses"], found["losses"]]
    if len(losses[0]) != len(losses[1]) or not losses[0]:
        return float("inf")
    pairs = zip(*losses, strict=True)
    return max((abs(a - b) / max(abs(a), 1e-3) for a, b in pairs), default=0.0)


def _is_trained(
    expected: Sequence[Any], found: Sequence[Any], example: Example, error: str
) -> bool:
    """Return whether all losses are there, and the error is the one that the script is known to end with on shards."""
    pairs = zip(expected, found, strict=True)
    is_known = bool(example.refused) and example.refused in error
    return is_known and all(len(e["losses"]) == len(f["losses"]) for e, f in pairs)


def _difference_of_files(expected: str, found: str) -> float | None:
    """Return the largest difference of the weights that litgpt merged and converted; None: there are none."""
    largest = None
    for name in (MERGED, CONVERTED):
        paths = [Path(folder) / name for folder in (expected, found)]
        if not all(path.exists() for path in paths):
            continue
        ours, theirs = (torch.load(path) for path in paths)
        if ours.keys() != theirs.keys():
            return float("inf")
        both = [(ours[key] - theirs[key]).abs().max().item() for key in ours]
        largest = max([*both, largest or 0.0])
    return largest


def _run(
    example: Example, strategy: str, num_ranks: int, checkout: Path, work: Path
) -> list[dict[str, Any]]:
    """Run a script in processes of its own; return what each rank recorded."""
    folder = work / f"{example.name}-{strategy.replace(':', '-')}-{num_ranks}"
    folder.mkdir()
    specification = {
        "example": example.name,
        "strategy": strategy,
        "num_ranks": num_ranks,
        "folder": str(folder),
        "checkout": str(checkout),
        "stand_ins": example.stand_ins,
        "forward_methods": example.forward_methods,
    }
    (folder / "spec.json").write_text(json.dumps(specification))
    command = [sys.executable, "-m"]
    if num_ranks > 1 or example.needs_group:
        launcher = ["torch.distributed.run", f"--nproc-per-node={num_ranks}", "--standalone"]
        command += [*launcher, "-m"]
    command += ["foreign.injected", str(folder / "spec.json")]
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, timeout=LIMIT_S, check=False)
    outcomes = [folder / f"outcome_{rank}.json" for rank in range(num_ranks)]
    if not all(path.exists() for path in outcomes):
        error = f"it ended with {done.returncode}: {(folder / 'log.txt').read_text()[-300:]}"
        return [{"error": error, "losses": [], "folder": str(folder)}] * num_ranks
    return [json.loads(path.read_text()) | {"folder": str(folder)} for path in outcomes]


def table(rows: Sequence[Row], tests: TestsOutcome | None) -> str:
    """Return the Markdown."""
    versions = ", ".join(f"{p} {version(p)}" for p in ("torch", "lightning", "lightning-thunder"))
    lines = [
        f"Scripts that nobody here wrote, unchanged, with our strategy in the place of theirs. Every loss that "
        f"`fabric.backward` got, on every rank, is compared with the same script under Lightning's `ddp`: equal means "
        f"within {CLOSE:.0e} of it. {versions}, CPU.",
        "",
        "| script | processes | strategy | | losses | largest difference | graphs | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        sharding = r.strategy.replace("thunder_memsave:", "").replace("thunder_memsave", "zero2")
        numbers = f"{r.num_losses} | {r.difference:.0e} | {r.num_graphs}"
        note = r.note.strip().replace("|", "/")
        lines.append(f"| {r.name} | {r.num_ranks} | {sharding} | {r.state} | {numbers} | {note} |")
    lines += ["", "Not run:", ""]
    lines += [f"- {name}: {reason}" for name, reason in NOT_RUN.items()]
    return "\n".join([*lines, *_tests_told(tests)]) + "\n"


def _tests_told(tests: TestsOutcome | None) -> list[str]:
    if tests is None:
        return []
    told = [
        "",
        f"**Lightning's own tests** ({', '.join(f'`{name}`' for name in FILES)}): "
        f"{tests.num_run} run here; "
        f"{tests.num_swapped} of them make a Fabric that can have another strategy, and got ours; of these "
        f"{tests.num_passed} pass. The others:",
        "",
        "| test | reason |",
        "|---|---|",
    ]
    return told + [f"| `{row.name}` | {row.reason} |" for row in tests.differing]


def _refuse_missing(path: Path | None, inside: str) -> None:
    if path is not None and not (path / inside).exists():
        raise SystemExit(
            f"there is no {inside} in {path}: pass a checkout (git clone) of the repository."
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lightning", type=Path, help="a checkout of pytorch-lightning")
    parser.add_argument("--litgpt", type=Path, help="a checkout of litgpt")
    parser.add_argument(
        "--only", nargs="*", help="names of examples, litgpt, tests; all by default"
    )
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--save", type=Path, help="a Markdown file; a JSON file is kept beside it")
    arguments = parser.parse_args()
    _refuse_missing(arguments.lightning, "examples/fabric")
    _refuse_missing(arguments.litgpt, "litgpt/finetune/lora.py")
    kept = arguments.save and arguments.save.with_suffix(".json")
    stored = json.loads(kept.read_text()) if kept and kept.exists() else {"rows": [], "tests": None}
    rows = [Row(**row) for row in stored["rows"]]
    tests = stored["tests"] and TestsOutcome(**stored["tests"])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.resolve()), *sys.path])
    checkouts = [(e, arguments.lightning) for e in EXAMPLES] + [(LITGPT, arguments.litgpt)]

    def save() -> None:
        if kept:
            told = {"rows": [asdict(r) for r in rows], "tests": tests and asdict(tests)}
            kept.write_text(json.dumps(told, indent=1))
            arguments.save.write_text(table(rows, tests))

    for example, checkout in checkouts:
        for num_ranks in arguments.ranks:
            is_known = (example.name, num_ranks) in {(r.name, r.num_ranks) for r in rows}
            is_wanted = not arguments.only or example.name in arguments.only
            if checkout is None or is_known or not is_wanted or num_ranks not in example.ranks:
                continue
            with tempfile.TemporaryDirectory() as work:
                found = compared(example, num_ranks, checkout.resolve(), Path(work))
            rows += found
            for row in found:
                print(row.name, row.num_ranks, row.strategy, row.state, row.note, flush=True)
            save()
    wants_tests = not arguments.only or "tests" in arguments.only
    if arguments.lightning and tests is None and wants_tests:
        with tempfile.TemporaryDirectory() as work:
            tests = run_tests(arguments.lightning.resolve(), Path(work))
        save()
    print(table(rows, tests))
    return int(any(r.state in ("differs", "fails") for r in rows))


if __name__ == "__main__":
    sys.exit(main())

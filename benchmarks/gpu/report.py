"""Writes the outcomes of a part as JSON and as a Markdown table, and measured memory into the documentation."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.checks import Outcome
from gpu.machine import short_name

_MEASURED = re.compile(r"(<!-- measured on a GPU -->\n).*?(<!-- end of measured -->)", re.DOTALL)
_MEMORY = "memory, "
"""How the names of checks begin that have points of memory."""
_GIB = 2**30


def write(
    outcomes: Sequence[Outcome],
    part: str,
    machine: Mapping[str, Any],
    directory: Path,
    *,
    seconds: float,
) -> Path:
    """Write both files, and return the path of the JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    date = time.strftime("%Y-%m-%d")
    path = directory / f"gpu_{part}_{date}_{short_name(machine)}.json"
    found = {
        "part": part,
        "date": date,
        "machine": dict(machine),
        "seconds": round(seconds, 1),
        "outcomes": [asdict(o) for o in outcomes],
    }
    path.write_text(json.dumps(found, indent=2) + "\n")
    path.with_suffix(".md").write_text(table(outcomes, part, machine, seconds=seconds))
    return path


def table(
    outcomes: Sequence[Outcome], part: str, machine: Mapping[str, Any], *, seconds: float
) -> str:
    """Make the Markdown: the machine, how many passed, a row for each check."""
    count = Counter(o.state for o in outcomes)
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    rows = [f"| {o.name} | {o.state} | {o.seconds:.0f} | {_cell(o.reason)} |" for o in outcomes]
    tiny = (
        ""
        if machine["device"] != "cpu"
        else " On a CPU the shapes are tiny: no number is a measurement."
    )
    head = [
        f"# `make gpu-{part}`: {machine['device']}, {time.strftime('%Y-%m-%d')}",
        "",
        f"{machine['host']}; {versions}; commit {machine['commit']}.",
        f"{count['passed']} passed, {count['failed']} failed, {count['not run']} not run, in {seconds:.0f} s.{tiny}",
        "",
        "| check | | s | found |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, *_points(outcomes), ""])


def _points(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the rows of tables of measurements, if there are any."""
    if any(p for o in outcomes for p in o.numbers.get("points", ())):
        yield ""
        yield from memory_rows(outcomes)


def memory_rows(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the table of predicted and measured memory."""
    yield "| trained | budget | predicted | allocated | reserved, simulated | reserved | expandable segments |"
    yield "|---|---|---|---|---|---|---|"
    for outcome in outcomes:
        for p in outcome.numbers.get("points", ()) if outcome.name.startswith(_MEMORY) else ():
            sizes = (p[n] for n in ("predicted", "allocated", "simulated_reserved", "reserved"))
            shown = " | ".join(_compared(n, p["predicted"]) for n in sizes)
            expandable = "on" if p["expandable"] else "off"
            yield f"| {p['trained']} | {p['budget']} | {shown} | {expandable} |"


def _compared(nbytes: int | None, predicted: int) -> str:
    if nbytes is None:
        return "not known"
    more = "" if nbytes == predicted else f" ({nbytes / predicted - 1:+.1%})"
    return f"{nbytes / _GIB:.2f} GiB{more}"


def update_docs(page: Path, outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> None:
    """Write the table of memory between the two markers of a page; leave it alone if nothing was measured."""
    rows = list(memory_rows(outcomes))
    if len(rows) == 2:
        return
    said = (
        f"Measured on {time.strftime('%Y-%m-%d')} on one {machine['device']} with torch "
        f"{machine['versions']['torch']} by `make gpu-correct`: 2 layers of Llama 3.1 8B, a row of 8,192 tokens; "
        "percentages are those of the predicted peak.\n"
    )
    text = page.read_text(encoding="utf-8")
    filled = "\n".join([said, *rows, ""])
    page.write_text(_MEASURED.sub(lambda m: m[1] + filled + m[2], text), encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

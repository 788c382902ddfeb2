"""Prints the steps of the compilation that came last, as a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.pipeline import STEPS
from thunder_memsave.compiler.step_records import StepRecord
from thunder_memsave.fusion.region import Region, known

_HEAD = ("", "step", "ms", "operations", "")
_CAPTURE = "capture the call, in ATen operators"


def explain_steps(compiled: Collection[Compiled]) -> str:
    """Print what each step took and left, of the compilation that came last.

    Args:
        compiled: In any order.

    Raises:
        RuntimeError: there is none.
    """
    if not compiled:
        raise RuntimeError(
            "nothing was compiled yet: that is done when a model that fabric.setup() returned is called for the first "
            "time. Run one step first."
        )
    last = max(compiled, key=lambda each: each.number)
    rows = [_HEAD, *(_row(number, record) for number, record in enumerate(last.records))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    about = (
        f"{last.method}: {len(last.records)} steps in {last.seconds:.1f} s; from the split on, operations are those of "
        "forward + backward"
    )
    lines = [about, "", *(_line(row, widths) for row in rows)]
    if regions := _regions(last):
        lines += ["", _about_regions(regions)]
    return "\n".join(lines)


def _regions(compiled: Compiled) -> Sequence[Region]:
    """Return the region of each symbol that calls one, in the traces of a step."""
    traces = (compiled.forward_traces[-1], *compiled.backward_traces)
    found = (known(b.sym.name) for t in traces for b in t.bound_symbols if b.sym.is_fusion)
    return [region for region in found if region is not None]


def _about_regions(regions: Sequence[Region]) -> str:
    distinct = {region.name: region for region in regions}.values()
    num_operators = sum(region.num_operators for region in regions)
    return (
        f"fuse: {len(regions)} regions, {len(distinct)} of them distinct, in place of {num_operators} operators; "
        f"compiled in {sum(region.compile_s for region in distinct):.1f} s"
    )


def _row(number: int, record: StepRecord) -> tuple[str, ...]:
    does = {"capture": _CAPTURE, **{step.name: step.does for step in STEPS}}
    counts = " + ".join(f"{n:,}" for n in record.num_operations)
    return str(number), record.name, f"{record.milliseconds:,.1f}", counts, does[record.name]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    number, name, milliseconds, counts, does = row
    cells = (
        number.rjust(widths[0]),
        name.ljust(widths[1]),
        milliseconds.rjust(widths[2]),
        counts.rjust(widths[3]),
        does,
    )
    return "  ".join(cells).rstrip()

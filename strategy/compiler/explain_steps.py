"""Prints the steps of the compilation that came last, as a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.pipeline import STEPS
from thunder_memsave.compiler.step_records import StepRecord

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
    return "\n".join([about, "", *(_line(row, widths) for row in rows)])


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

"""The command `thunder-memsave plan`: a run file in, the memory of the run on each device out."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thunder_memsave.errors import DOES_NOT_FIT, BudgetError
from thunder_memsave.finetune.plan import device_options
from thunder_memsave.finetune.plan.plan_progress import Progress
from thunder_memsave.finetune.run_file.reading.arguments import take_options
from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.planner.graph import Device
from thunder_memsave.planner.report.explain import explain, in_units, kinds_table
from thunder_memsave.planner.report.offload_shown import offload_json
from thunder_memsave.planner.report.reserved_shown import describe_reserved
from thunder_memsave.planner.report.step_work import sustained_us, work_table
from thunder_memsave.planner.reserved import ReservedMemory
from thunder_memsave.progress import stage
from thunder_memsave.settings.problems import ConfigError

if TYPE_CHECKING:
    from thunder_memsave.finetune.plan.longest_row import LongestRow
    from thunder_memsave.finetune.plan.plan_run import RunPlan
    from thunder_memsave.finetune.run_file.config import RunConfig

_OPTIONS = {
    "--world-size": "64",
    **device_options.EXAMPLES,
    "--budget": "60GiB",
    "--json": "plan.json",
    "--html": "plan.html",
}
_WORK = "--work"
_LONGEST = "--longest"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Arguments of the command line besides the run file."""

    num_ranks: int | None = None
    """Number of ranks; None means the run file's `devices`, or torchrun's number."""
    device: Device = DEVICES["h200"]
    json: Path | None = None
    html: Path | None = None
    shows_work: bool = False
    """Whether to add up FLOPs, bytes moved and time by kind of operation."""
    finds_longest: bool = False
    """Whether to search for the longest row that fits; `data.max_seq_length` is where the search begins."""


def parse_options(arguments: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """Split the command's own options from its other arguments: a run file and overrides of its keys.

    Raises:
        ConfigError: an option has no value, or an invalid one.
    """
    given, others = take_options(arguments, _OPTIONS, flags={_WORK, _LONGEST})
    rest = [word for each in others for word in each.typed]
    if "--budget" in given:
        rest.append(f"--memory.budget={given['--budget']}")
    return _options(given), rest


def _options(given: dict[str, str]) -> PlanOptions:
    ranks = given.get("--world-size")
    if ranks is not None and (not ranks.isdecimal() or int(ranks) < 1):
        raise ConfigError(f"--world-size is {ranks!r}, but must be a whole number of at least 1.")
    for name in ("--json", "--html"):
        if name in given:
            _refuse_unwritable(name, Path(given[name]))
    return PlanOptions(
        num_ranks=None if ranks is None else int(ranks),
        device=device_options.chosen_device(given),
        json=Path(given["--json"]) if "--json" in given else None,
        html=Path(given["--html"]) if "--html" in given else None,
        shows_work=_WORK in given,
        finds_longest=_LONGEST in given,
    )


def _refuse_unwritable(name: str, path: Path) -> None:
    """Refuse an output file that cannot be written before planning, which takes minutes."""
    if path.is_dir():
        raise ConfigError(f"{name} is {path}, which is a directory; name a file in it.")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{name} is {path}, but there is no directory {path.parent}; make it, or name a file elsewhere."
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{name} is {path}, which may not be written; name a file elsewhere.")


def run_plan(config: RunConfig, options: PlanOptions) -> int:
    """Make the plan, print it, write the requested reports, and return the exit code.

    Returns:
        0 if the run fits, 3 if not.
    """
    progress = Progress()
    try:
        with _ends_at_ctrl_c(), _without_garbage_collection(), progress.shown():
            made, config, longest = _planned(config, options)
    except BudgetError as error:
        print(f"it does not fit: {error}")
        return DOES_NOT_FIT
    if longest is not None:
        print(f"{longest.sentence}\n")
    print(describe_plan(made, config, progress))
    if options.shows_work:
        print(f"\n{work_table(made.call.program, made.device)}")
    if options.json is not None:
        text = json.dumps({**as_json(made, progress), **_longest_json(longest)}, indent=2)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    if options.html is not None:
        _write_html(options.html, made, config)
    return 0 if made.fits else DOES_NOT_FIT


def _planned(
    config: RunConfig, options: PlanOptions
) -> tuple[RunPlan, RunConfig, LongestRow | None]:
    """Return the plan, the run that it is of, and how the length of its rows was found, if it was searched for."""
    # These imports take seconds; mistakes in the arguments are found first.
    stage("load libraries")
    from thunder_memsave.finetune.model.build import positions_of
    from thunder_memsave.finetune.plan.longest_row import longest_row, with_row
    from thunder_memsave.finetune.plan.plan_run import plan_run
    from thunder_memsave.finetune.run_file.launch import world_size

    num_ranks = options.num_ranks or world_size(config)
    has_curve = options.json is not None or options.html is not None

    def plan(num_tokens: int) -> RunPlan:
        run = with_row(config, num_tokens)
        return plan_run(
            run,
            device=options.device,
            num_ranks=num_ranks,
            has_curve=has_curve,
            counts_tiles=options.finds_longest,
        )

    length = config.data.max_seq_length
    if not options.finds_longest:
        return plan(length), config, None
    found = longest_row(plan, start=length, most=positions_of(config), say=_say)
    return found.made, with_row(config, found.num_tokens), found


def _write_html(path: Path, made: RunPlan, config: RunConfig) -> None:
    from thunder_memsave.planner.report.html import Speed, write_report

    call = made.call
    ops = [step.op for step in call.program.steps if step.op.repeat != "free"]
    write_report(
        path,
        plan=_plan(made),
        program=call.program,
        profile=call.profile,
        memory=call.memory,
        curve=made.curve,
        title=_title(made, config),
        speed=Speed(
            micro_batch_ms=sum(sustained_us(op, made.device) for op in ops) / 1e3,
            tokens=made.num_rows * made.num_tokens * made.num_ranks,
            num_devices=made.num_ranks,
            device=made.device.name,
        ),
        facts={
            "smallest budget with a plan, about": in_units(made.smallest_bytes),
            "twice the rows per micro-batch, about": in_units(made.doubled_bytes),
        },
    )


def _say(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)


def _longest_json(longest: LongestRow | None) -> dict[str, Any]:
    if longest is None:
        return {}
    return {
        "longest_row": longest.num_tokens if longest.made.fits else None,
        "refused_row": longest.refused_num_tokens,
        "positions": longest.most,
    }


@contextmanager
def _ends_at_ctrl_c() -> Iterator[None]:
    """Exit at once on Ctrl-C: tracing code might catch an exception, and cleaning up millions of objects takes long."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals only in the main thread
        return

    def end(signum: int, frame: object) -> None:
        print("\ninterrupted.", file=sys.stderr, flush=True)
        os._exit(128 + signum)

    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: traces are millions of live objects, and collecting took a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def describe_plan(made: RunPlan, config: RunConfig, progress: Progress) -> str:
    """Write the tables and say whether the run fits."""
    plan = _plan(made)
    return "\n".join(
        [
            _title(made, config),
            "",
            "on each rank, when it holds the most:",
            kinds_table(made.call.profile),
            *_reserved(made),
            "",
            explain(plan, num_rows=12),
            "",
            f"smallest budget with a plan: about {in_units(made.smallest_bytes)}{_of_tensors(made)}",
            f"twice the rows per micro-batch: about {in_units(made.doubled_bytes)} with the same plan",
            _made_in(plan, progress),
            "",
            _verdict(made, config),
            *_lacking(made, config),
        ]
    )


def _lacking(made: RunPlan, config: RunConfig) -> list[str]:
    """Warn of a budget that leaves less of the device than CUDA and nccl are estimated to need."""
    if made.lacking_bytes == 0:
        return []
    advice = "raise memory.reserve" if config.memory.budget == "auto" else "lower memory.budget"
    return [
        f"warning: the budget leaves {in_units(made.lacking_bytes)} less of the {made.device.name} than what is "
        f"outside of PyTorch's allocator is estimated to need; {advice} by that."
    ]


def _reserved(made: RunPlan) -> list[str]:
    """Say what is reserved, on CUDA devices."""
    if made.reserved is None:
        return []
    outside = ", ".join(f"{in_units(n)} of {name}" for name, n in made.outside_bytes.items())
    return [
        describe_reserved(made.reserved, peak_bytes=made.call.profile.peak_bytes),
        f"outside of PyTorch's allocator, estimated: {outside}",
    ]


def _title(made: RunPlan, config: RunConfig) -> str:
    ranks = f"{made.num_ranks} rank{'s' if made.num_ranks > 1 else ''}"
    rows = f"{made.num_rows} row{'s' if made.num_rows > 1 else ''} of {made.num_tokens:,} tokens"
    return f"{config.model.name_or_path} on {ranks} of {made.device.name}, {rows} each"


def _made_in(plan: Any, progress: Progress) -> str:
    total_s, solve_s = sum(progress.cpu_seconds.values()), progress.cpu_seconds.get("solve", 0.0)
    took = f"made in {total_s:.0f} s, {solve_s:.1f} s of it to solve"
    if not math.isfinite(plan.gap):
        return took
    if plan.gap == 0.0:
        return f"{took}: no plan recomputes less"
    return f"{took}: it recomputes {plan.gap:.1%} more than any plan must"


def _of_tensors(made: RunPlan) -> str:
    """Say that the smallest budget does not count what is reserved: only a plan that was carried out is simulated."""
    return " of tensors" if made.fits and made.limits_reserved else ""


def _verdict(made: RunPlan, config: RunConfig) -> str:
    peak = in_units(made.call.profile.peak_bytes)
    if made.limits_reserved and isinstance(made.reserved, ReservedMemory):
        peak = f"{in_units(made.reserved.reserved_bytes)} reserved"
    if made.budget_bytes is None:
        return f"there is no budget; it needs {peak}."
    budget = in_units(made.budget_bytes)
    if made.fits and made.call.empties_cache:
        return (
            f"it fits {budget}, but only if PyTorch's allocator gives cached memory back when that is reached, which "
            "waits for the device; a larger budget is faster."
        )
    if made.fits:
        return f"it fits: {peak} of {budget}."
    return (
        f"it does not fit: the budget is {budget}, and the smallest for which a plan was found is "
        f"{in_units(made.smallest_bytes)}; the tables above are for {peak}. A smaller train.micro_batch_size or "
        "data.max_seq_length needs less, and so do more ranks with strategy.sharding zero3."
    )


def as_json(made: RunPlan, progress: Progress) -> dict[str, Any]:
    """Return the plan as plain values."""
    plan, profile = _plan(made), made.call.profile
    return {
        "fits": made.fits,
        "device": made.device.name,
        "world_size": made.num_ranks,
        "budget_bytes": made.budget_bytes,
        "predicted_peak_bytes": profile.peak_bytes,
        "peak_bytes_by_kind": dict(profile.peak_bytes_by_kind),
        "reserved_simulated": (
            dataclasses.asdict(made.reserved) if isinstance(made.reserved, ReservedMemory) else None
        ),
        "outside_bytes": dict(made.outside_bytes),
        "keep_all_peak_bytes": plan.keep_all_peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "recompute_us": plan.recompute_us,
        "lower_bound_us": plan.lower_bound_us,
        "gap": plan.gap if math.isfinite(plan.gap) else None,
        "cpu_seconds": dict(progress.cpu_seconds),
        "smallest_budget_bytes": made.smallest_bytes,
        "doubled_batch_bytes": made.doubled_bytes,
        "offload": None if made.call.time is None else offload_json(made.call.time),
        "curve": [list(point) for point in made.curve],
        "decisions": [dataclasses.asdict(each) for each in plan.decisions],
    }


def _plan(made: RunPlan) -> Any:
    assert made.call.plan is not None, "a model with trained weights has a backward"
    return made.call.plan

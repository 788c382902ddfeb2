"""The command `thunder-memsave plan`: a run file in, the memory of the run on each device out."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thunder_memsave.collector import collector
from thunder_memsave.errors import DOES_NOT_FIT, BudgetError
from thunder_memsave.finetune.plan import device_options
from thunder_memsave.finetune.plan.plan_progress import Progress
from thunder_memsave.finetune.plan.plan_text import as_json, describe_plan, plan_of, title
from thunder_memsave.finetune.plan.search import options as search_options
from thunder_memsave.finetune.plan.search.options import SearchOptions
from thunder_memsave.finetune.plan.speed import micro_batch_us
from thunder_memsave.finetune.run_file.reading.arguments import take_options
from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.planner.graph import Device
from thunder_memsave.planner.report.explain import in_units
from thunder_memsave.planner.report.step_work import work_table
from thunder_memsave.progress import stage
from thunder_memsave.settings.problems import ConfigError

if TYPE_CHECKING:
    from thunder_memsave.finetune.plan.cheapest_change import Found
    from thunder_memsave.finetune.plan.longest_row import LongestRow
    from thunder_memsave.finetune.plan.other_formats import Choice
    from thunder_memsave.finetune.plan.plan_run import RunPlan
    from thunder_memsave.finetune.plan.what_if import WhatIf
    from thunder_memsave.finetune.run_file.config import RunConfig
    from thunder_memsave.finetune.run_file.reading.parse import RunFile

_OPTIONS = {
    "--world-size": "64",
    **device_options.EXAMPLES,
    **search_options.EXAMPLES,
    "--budget": "60GiB",
    "--json": "plan.json",
    "--html": "plan.html",
}
_WORK = "--work"
_LONGEST = "--longest"
_FORMATS = "--formats"
_WHAT_IF = "--what-if"
_FLAGS = (_WORK, _LONGEST, _FORMATS, _WHAT_IF)
PLAN_OPTIONS = (*_OPTIONS, *_FLAGS)
"""The command's own options, beside keys of a run file."""


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
    shows_formats: bool = False
    """Whether to show what weights and optimizer states would take in other formats."""
    finds_longest: bool = False
    """Whether to search for the longest row that fits; `data.max_seq_length` is where the search begins."""
    shows_what_if: bool = False
    """Whether to plan the run with one thing changed at a time."""
    search: SearchOptions | None = None
    """What to search, if the question is what to run."""


def parse_options(arguments: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """Split the command's own options from its other arguments: a run file and overrides of its keys.

    Raises:
        ConfigError: an option has no value, or an invalid one.
    """
    words = search_options.with_value(arguments)
    given, others = take_options(words, _OPTIONS, flags=_FLAGS)
    rest = [word for each in others for word in each.typed]
    if "--budget" in given:
        rest.append(f"--memory.budget={given['--budget']}")
    return _options(given), rest


def _options(given: dict[str, str]) -> PlanOptions:
    for name in ("--json", "--html"):
        if name in given:
            _refuse_unwritable(name, Path(given[name]))
    if (search := search_options.search_options(given)) is not None:
        _refuse_beside_search(given)
        json = Path(given["--json"]) if "--json" in given else None
        return PlanOptions(json=json, search=search)
    ranks = given.get("--world-size")
    if ranks is not None and (not ranks.isdecimal() or int(ranks) < 1):
        raise ConfigError(f"--world-size is {ranks!r}, but must be a whole number of at least 1.")
    return PlanOptions(
        num_ranks=None if ranks is None else int(ranks),
        device=device_options.chosen_device(given),
        json=Path(given["--json"]) if "--json" in given else None,
        html=Path(given["--html"]) if "--html" in given else None,
        shows_work=_WORK in given,
        shows_formats=_FORMATS in given,
        finds_longest=_LONGEST in given,
        shows_what_if=_WHAT_IF in given,
    )


def _refuse_beside_search(given: dict[str, str]) -> None:
    """Refuse options that say more of one plan: a search makes many."""
    for name in ("--html", _WORK, _LONGEST, _FORMATS, _WHAT_IF):
        if name in given:
            raise ConfigError(
                f"{name} is of one plan, and --search makes many; leave one of the two out."
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
        # Traces are millions of live objects, and collecting took a quarter of the time.
        with _ends_at_ctrl_c(), collector(runs=False), progress.shown():
            answer = _answer(config, options, progress.say)
    except BudgetError as error:
        print(f"it does not fit: {error}")
        return DOES_NOT_FIT
    made, config = answer.made, answer.config
    if answer.longest is not None:
        print(f"{answer.longest.sentence}\n")
    print(describe_plan(made, config, progress))
    for text in answer.more:
        print(f"\n{text}")
    if options.shows_work:
        print(f"\n{work_table(made.call.program, made.device)}")
    if options.json is not None:
        text = json.dumps({**as_json(made, progress), **answer.as_json()}, indent=2)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    if options.html is not None:
        _write_html(options.html, answer)
        print(f"\nthe same as a page: {options.html}")
    return 0 if made.fits else DOES_NOT_FIT


def run_search(run_file: RunFile, options: PlanOptions) -> int:
    """Search what to run, print the table, write the requested files, and return the exit code.

    Returns:
        0 if something fits, 3 if nothing does.
    """
    assert options.search is not None
    print("load libraries", file=sys.stderr, flush=True)
    from thunder_memsave.finetune.plan.search.search_command import SearchRun

    run = SearchRun.of(run_file, options.search)
    with _ends_at_ctrl_c(run.interrupted), collector(runs=False):
        run.run()
    return run.report(options.json)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """A plan, and what was asked for beside it."""

    made: RunPlan
    config: RunConfig
    """The run that it is of."""
    longest: LongestRow | None
    """How the length of its rows was found, if it was searched for."""
    formats: Sequence[Choice]
    """Weights and states in other formats, if these were asked for."""
    others: Sequence[WhatIf]
    """Runs with one thing changed, if these were asked for."""
    change: Found | None
    """Of a run that does not fit: a change with which it does."""

    @property
    def more(self) -> list[str]:
        """What follows the plan."""
        from thunder_memsave.finetune.plan.cheapest_change import NO_CHANGE
        from thunder_memsave.finetune.plan.other_formats import formats_table
        from thunder_memsave.finetune.plan.what_if import what_if_table

        table = formats_table(self.formats, budget_bytes=self.made.budget_bytes)
        found = [table] if self.formats else []
        found += [what_if_table(self.others)] if self.others else []
        if self.made.fits or self.longest is not None:
            return found
        return [*found, NO_CHANGE if self.change is None else self.change.sentence]

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        change = None if self.change is None else self.change.change.shown
        formats = [dataclasses.asdict(each) for each in self.formats]
        loading = None if self.made.loading is None else dataclasses.asdict(self.made.loading)
        others = [each.as_json() for each in self.others]
        found = {
            "change": change,
            "formats": formats,
            "what_if": others,
            "host_loading": loading,
        }
        return {**found, **_longest_json(self.longest)}


def _answer(config: RunConfig, options: PlanOptions, say: Callable[[str], None]) -> _Answer:
    # These imports take seconds; mistakes in the arguments are found first.
    stage("load libraries")
    from thunder_memsave.finetune.model.build import positions_of
    from thunder_memsave.finetune.plan.cheapest_change import cheapest_change
    from thunder_memsave.finetune.plan.longest_row import longest_row, with_row
    from thunder_memsave.finetune.plan.other_formats import Known, choices
    from thunder_memsave.finetune.plan.plan_run import plan_run
    from thunder_memsave.finetune.plan.what_if import what_if
    from thunder_memsave.finetune.run_file.launch import world_size

    def plan(run: RunConfig, num_ranks: int) -> RunPlan:
        return plan_run(
            run,
            device=options.device,
            num_ranks=num_ranks,
            has_curve=options.json is not None or options.html is not None,
            counts_tiles=options.finds_longest,
        )

    def other_plan(run: RunConfig, device: Device, num_ranks: int) -> RunPlan:
        return plan_run(run, device=device, num_ranks=num_ranks, has_curve=False)

    num_ranks = options.num_ranks or world_size(config)
    longest = None
    if options.finds_longest:
        longest = longest_row(
            lambda num_tokens: plan(with_row(config, num_tokens), num_ranks),
            start=config.data.max_seq_length,
            most=positions_of(config),
            say=say,
        )
        config = with_row(config, longest.num_tokens)
    made = plan(config, num_ranks) if longest is None else longest.made
    formats = choices(config, config, Known.of_plan(made)) if options.shows_formats else ()
    others = what_if(config, made, other_plan, say=say) if options.shows_what_if else ()
    change = None
    if not made.fits and longest is None:
        change = cheapest_change(config, made, plan, say=say)
    return _Answer(
        made=made,
        config=config,
        longest=longest,
        formats=formats,
        others=others,
        change=change,
    )


def _write_html(path: Path, answer: _Answer) -> None:
    from thunder_memsave.finetune.plan.what_if import HEAD
    from thunder_memsave.planner.report.html import Speed, write_report

    made, call = answer.made, answer.made.call
    write_report(
        path,
        plan=plan_of(made),
        program=call.program,
        profile=call.profile,
        memory=call.memory,
        curve=made.curve,
        title=title(made, answer.config),
        speed=Speed(
            micro_batch_ms=micro_batch_us(made) / 1e3,
            tokens=made.num_rows * made.num_tokens * made.num_ranks,
            num_devices=made.num_ranks,
            device=made.device.name,
        ),
        others=[HEAD, *(each.cells for each in answer.others)] if answer.others else (),
        facts={
            "smallest budget with a plan, about": in_units(made.smallest_bytes),
            "twice the rows per micro-batch, about": in_units(made.doubled_bytes),
        },
    )


def _longest_json(longest: LongestRow | None) -> dict[str, Any]:
    if longest is None:
        return {}
    return {
        "longest_row": longest.num_tokens if longest.made.fits else None,
        "refused_row": longest.refused_num_tokens,
        "positions": longest.most,
    }


@contextmanager
def _ends_at_ctrl_c(so_far: Callable[[], str] | None = None) -> Iterator[None]:
    """Exit at once on Ctrl-C: tracing code might catch an exception, and cleaning up millions of objects takes long.

    Args:
        so_far: Returns what is printed before, if anything.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals only in the main thread
        return

    def end(signum: int, frame: object) -> None:
        print("\ninterrupted.", file=sys.stderr, flush=True)
        if so_far is not None:
            print(so_far(), flush=True)
        os._exit(128 + signum)

    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)

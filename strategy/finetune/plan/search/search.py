"""Decides which runs are planned: bounds leave out what cannot fit, and what another plan shows to be no faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from thunder_memsave.config import ShardingConfig
from thunder_memsave.errors import BudgetError, ThunderMemsaveError
from thunder_memsave.finetune.plan.search.asked import Asked, Judges, LeftOut
from thunder_memsave.finetune.plan.search.axes import (
    Setting,
    micro_batch_sizes,
    values_with_rows,
)
from thunder_memsave.finetune.plan.search.forecast import Forecast, Row
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.planner.report.explain import in_units
from thunder_memsave.settings.problems import ConfigError

MOST_ROWS = 10
_ROOM = 0.5
"""Part of a budget that weights and states of the first setting may take; otherwise the roomiest is planned first."""
_NOTICEABLE = 0.02
"""Part of a budget that fewer bits or copies save at least for a run with them to be planned."""
_AS_IT_IS = "the run as it is"
NUM_EXACT = 4
"""First rows of the table that are planned exactly, where others are estimates."""
_SURE = 0.8
"""Part of what an estimate counts beside weights and states: others shard and gather more or less of it."""


_T = TypeVar("_T")
_Try = Generator[Asked, Forecast | ThunderMemsaveError, None]
"""The plans of one setting, one after the other: asks for each, and is sent what was found."""


@dataclass(kw_only=True)
class Search:
    """Plans runs one by one, and remembers them."""

    config: RunConfig
    axes: Collection[str]
    in_all: int
    """Rows of an optimizer step, which stay."""
    judges: Judges
    say: Callable[[str], None]
    num_at_once: int = 1
    """Settings that are tried together."""
    estimates: bool = False
    """Whether runs are planned with few of their layers at first, and only the best ones with all."""
    shows_devices: bool = False
    """Whether there are several, so that each run names its own."""
    shows_ranks: bool = False
    found: list[Row] = field(default_factory=list)
    """Runs that fit, in the order in which they were planned."""
    left_out: list[LeftOut] = field(default_factory=list)
    num_plans: int = 0
    num_estimates: int = 0
    _planned: list[tuple[Setting, int, Forecast]] = field(default_factory=list)

    def run(self, settings: Iterable[Setting]) -> None:
        """Try all settings, each with the micro-batches that may be faster.

        Settings are begun in their order, `num_at_once` of them beside each other, and learn of the plans that are
        made by then. Which ones are left out can so depend on how fast they are planned.
        """
        self._find(settings)
        if self.estimates:
            self._plan_the_first()

    def _find(self, settings: Iterable[Setting]) -> None:
        left = iter(self._roomiest_first(list(settings)))
        running: list[tuple[_Try, Asked]] = []
        most = 1  # the first alone, as it tells about the others
        while True:
            while len(running) < most and (setting := next(left, None)) is not None:
                self._begin(running, _next(self._tried(setting)))
            if not running:
                return
            self._begin(running, _next(*self._ended(running)))
            most = self.num_at_once

    def _plan_the_first(self) -> None:
        """Plan the first rows of the table with all layers, in the table's order, until all of them are plans."""
        running: list[tuple[Row, Asked]] = []
        while True:
            rows = [row for row in self.ranked[:NUM_EXACT] if row.forecast.is_estimate]
            begun = [row for row, _ in running]
            for row in [row for row in rows if row not in begun][: self.num_at_once - len(begun)]:
                self._say_plan(row.change)
                asked = Asked(row.values, row.setting)
                self.judges.begin(asked)
                running.append((row, asked))
            if not running:
                return
            self._know(*self._ended(running))

    def _ended(self, running: list[tuple[_T, Asked]]) -> tuple[_T, Forecast | ThunderMemsaveError]:
        """Wait for one of the plans that run, take it out of them, and return for whom it is, and what it says."""
        ended, made = self.judges.ended()
        (number,) = [i for i, (_, asked) in enumerate(running) if asked is ended]
        asker, _ = running.pop(number)
        return asker, made

    def _know(self, row: Row, made: Forecast | ThunderMemsaveError) -> None:
        """Put a plan in the place of an estimate."""
        self.found.remove(row)
        if (reason := _refusal(row.values, made)) is not None:
            self.left_out.append(LeftOut(change=row.change, reason=reason))
        elif isinstance(made, Forecast):
            self.found.append(replace(row, forecast=made))

    def _say_plan(self, change: str) -> None:
        self.num_plans += 1
        self.say(f"plan {self.num_plans}: {change or _AS_IT_IS}")

    def _begin(self, running: list[tuple[_Try, Asked]], begun: tuple[_Try, Asked] | None) -> None:
        if begun is not None:
            self.judges.begin(begun[1])
            running.append(begun)

    def _tried(self, setting: Setting) -> _Try:
        try:
            rows = self._rows(setting)
        except ConfigError as error:  # a batch that the ranks do not divide
            self._leave_out(setting, None, str(error))
            return
        try:
            yield from self._try(setting, rows)
        except ConfigError as error:
            is_one_of_several = self.shows_ranks or self.shows_devices
            if not setting.values and not is_one_of_several:  # the run itself
                raise
            self._leave_out(setting, None, str(error))

    def _roomiest_first(self, settings: list[Setting]) -> list[Setting]:
        """Begin with a setting that fits if any does: what it needs beside weights tells which others cannot.

        Of one form, the most and fastest devices come first, which fill the table.
        """
        settings = sorted(settings, key=lambda s: (-s.number_of_form, *_speed(s)), reverse=True)
        keeping = [s for s in settings if s.keeps_numbers]
        if not keeping or self._filled(settings[0]) <= _ROOM:
            return settings
        enough = 1.1 * min(map(self._filled, keeping))
        roomy = [s for s in keeping if self._filled(s) <= enough]
        found = min(roomy, key=lambda s: len(s.values))
        return [found, *(setting for setting in settings if setting is not found)]

    def _filled(self, setting: Setting) -> float:
        """Return the part of the budget that weights and states take; infinite where they cannot be divided."""
        try:
            budget = self.judges.budget_bytes(setting)
            return 0.0 if budget is None else self.judges.held_bytes(setting) / budget
        except ConfigError:  # which `_tried` tells of
            return math.inf

    @property
    def ranked(self) -> list[Row]:
        """The best runs: those that keep the run's numbers first, and of these the fastest."""
        ranked = sorted(self.found, key=lambda r: (not r.keeps_numbers, -r.forecast.tokens_per_s))
        return ranked[:MOST_ROWS]

    def _rows(self, setting: Setting) -> list[int]:
        return micro_batch_sizes(
            self.config, axes=self.axes, num_ranks=setting.num_ranks, in_all=self.in_all
        )

    def _try(self, setting: Setting, rows: Sequence[int]) -> _Try:
        held, budget = self.judges.held_bytes(setting), self.judges.budget_bytes(setting)
        if budget is not None and held > budget:
            held_of = f"weights and optimizer states take {in_units(held)} of {in_units(budget)}"
            self._leave_out(setting, None, held_of)
            return
        if self._saves_twice(setting):
            self._leave_out(
                setting,
                None,
                "a run fits that needs less than both fewer bits and copies to the host",
            )
            return
        own = self.config.train.micro_batch_size or 1
        begin = max((i for i, n in enumerate(rows) if n <= own), default=0)
        if (reason := self._saves_little(setting, rows[begin])) is not None:
            self._leave_out(setting, None, reason)
            return
        first = yield from self._forecast(setting, rows[begin])
        if first is None or first.fits:
            yield from self._more_rows(setting, rows[begin + 1 :], first)
        else:
            yield from self._fewer_rows(setting, rows[:begin])

    def _more_rows(self, setting: Setting, rows: Sequence[int], before: Forecast | None) -> _Try:
        """Plan more rows at once as long as they fit and are faster."""
        budget = self.judges.budget_bytes(setting)
        for num_rows in rows:
            if before is not None and budget is not None and before.next_bytes > budget:
                about = f"it is estimated to need {in_units(before.next_bytes)} at least"
                self._leave_out(setting, num_rows, about)
                return
            after = yield from self._forecast(setting, num_rows)
            if after is not None and not after.fits:
                return
            if (
                after is not None
                and before is not None
                and after.tokens_per_s < before.tokens_per_s
            ):
                return
            before = after or before

    def _fewer_rows(self, setting: Setting, rows: Sequence[int]) -> _Try:
        """Plan fewer rows at once until they fit."""
        for num_rows in reversed(rows):
            found = yield from self._forecast(setting, num_rows)
            if found is None or found.fits:
                return

    def _forecast(
        self, setting: Setting, num_rows: int
    ) -> Generator[Asked, Forecast | ThunderMemsaveError, Forecast | None]:
        """Plan a run, unless one that is no slower is planned; None: it was not, or cannot be."""
        if (needless := self._needless(setting, num_rows)) is not None:
            self._leave_out(setting, num_rows, needless)
            return None
        if (about := self._too_many_bytes(setting, num_rows)) is not None:
            reason = f"it is estimated to need {in_units(about)} at least"
            self._leave_out(setting, num_rows, reason)
            return _refused(about)
        if self._is_below_the_table(setting, num_rows):
            self._leave_out(setting, num_rows, f"it cannot be among the first {MOST_ROWS}")
            return None
        values = self._values(setting, num_rows)
        change = self._change(setting, values)
        if self.estimates:
            self.num_estimates += 1
            self.say(f"estimate {self.num_estimates}: {change or _AS_IT_IS}")
        else:
            self._say_plan(change)
        made = yield Asked(values, setting, has_few_layers=self.estimates)
        if (refusal := _refusal(values, made)) is not None:
            self._leave_out(setting, num_rows, refusal)
        if isinstance(made, ThunderMemsaveError):
            return None
        self._planned.append((setting, num_rows, made))
        if refusal is not None:
            return made
        self.found.append(Row(change=change, values=values, setting=setting, forecast=made))
        return made

    def _needless(self, setting: Setting, num_rows: int) -> str | None:
        """Say why planned runs make a plan of this one needless; None: they do not."""
        better = self._no_slower(setting, num_rows)
        if better is not None:
            return f"it cannot be faster than {better or _AS_IT_IS}"
        return self._saves_little(setting, num_rows)

    def _too_many_bytes(self, setting: Setting, num_rows: int) -> int | None:
        """Estimate what a run needs at least if that exceeds its budget: its weights, and what others work with."""
        budget = self.judges.budget_bytes(setting)
        per_row = [
            made.working_bytes / rows
            for other, rows, made in self._planned
            if made.fits and other.copies_no_less(setting) and other.work == setting.work
        ]
        if budget is None or not per_row:
            return None
        about = self.judges.held_bytes(setting) + int(_SURE * min(per_row) * num_rows)
        return about if about > budget else None

    def _saves_twice(self, setting: Setting) -> bool:
        """Tell whether a setting saves memory with fewer bits and with copies, though a run fits with its numbers."""
        is_with_both = bool(setting.form.values) and "memory.offload" in setting.values
        return is_with_both and any(row.keeps_numbers for row in self.found)

    def _saves_little(self, setting: Setting, num_rows: int) -> str | None:
        """Say which planned run this one does no less than, for few bytes that could be saved; None: there is none."""
        budget = self.judges.budget_bytes(setting)
        held = self.judges.held_bytes(setting)
        for other, rows, made in self._planned:
            if budget is None or rows != num_rows or not setting.works_as(other):
                continue
            saved = self.judges.held_bytes(other) - held
            if saved < _NOTICEABLE * budget and (made.fits or made.peak_bytes - saved > budget):
                change = self._change(other, self._values(other, rows)) or _AS_IT_IS
                return f"it holds only {in_units(saved)} less than {change}"
        return None

    def _is_below_the_table(self, setting: Setting, num_rows: int) -> bool:
        """Tell whether the table is full of better runs: by what a like run would do without recomputation."""
        ranked = self.ranked
        if len(ranked) < MOST_ROWS:
            return False
        last = ranked[-1]
        if setting.keeps_numbers != last.keeps_numbers:
            return last.keeps_numbers
        free = [
            made.tokens_per_s / (1 - made.recompute_share)
            for other, rows, made in self._planned
            if rows == num_rows and setting.is_as_fast_as(other)
        ]
        return bool(free) and max(free) < last.forecast.tokens_per_s

    def _no_slower(self, setting: Setting, num_rows: int) -> str | None:
        """Return a planned run that does no more than this one would, with as many rows, and recomputes nothing."""
        for other, rows, made in self._planned:
            is_free = made.fits and not made.recomputes_for_budget
            if is_free and rows == num_rows and setting.costs_no_less(other):
                return self._change(other, self._values(other, rows))
        return None

    def _leave_out(self, setting: Setting, num_rows: int | None, reason: str) -> None:
        values = setting.values if num_rows is None else self._values(setting, num_rows)
        self.left_out.append(LeftOut(change=self._change(setting, values), reason=reason))

    def _values(self, setting: Setting, num_rows: int) -> dict[str, Any]:
        return values_with_rows(self.config, setting, num_rows=num_rows, in_all=self.in_all)

    def _change(self, setting: Setting, values: Mapping[str, Any]) -> str:
        """Return a change as one types it."""
        words = [f"--device={setting.device.name}"] if self.shows_devices else []
        words += [f"--world-size={setting.num_ranks}"] if self.shows_ranks else []
        return " ".join([*words, *(f"--{key}={shown(value)}" for key, value in values.items())])


def _next(
    each: _Try, answer: Forecast | ThunderMemsaveError | None = None
) -> tuple[_Try, Asked] | None:
    """Send an answer, and return what is asked next; None: nothing."""
    try:
        return each, next(each) if answer is None else each.send(answer)
    except StopIteration:
        return None


def _refusal(values: Mapping[str, Any], made: Forecast | ThunderMemsaveError) -> str | None:
    """Say why a run is left out; None: it fits. What is wrong with the run itself is raised."""
    if isinstance(made, ThunderMemsaveError):
        if not values and not isinstance(made, BudgetError):
            raise made
        return str(made)
    about = "about " if made.is_estimate else ""
    return None if made.fits else f"it needs {about}{in_units(made.peak_bytes)} at least"


def _speed(setting: Setting) -> tuple[float, float]:
    """Return FLOP/s and bytes per second of all devices."""
    device, ranks = setting.device, setting.num_ranks
    return ranks * max(device.flops_per_s.values()), ranks * device.memory_bytes_per_s


def _refused(about_bytes: int) -> Forecast:
    """Return what is said of a run that is estimated not to fit."""
    return Forecast(
        fits=False,
        peak_bytes=about_bytes,
        budget_bytes=None,
        constant_bytes=0,
        least_bytes=about_bytes,
        recompute_share=0.0,
        recomputes_for_budget=True,
        tokens_per_s=0.0,
    )


def shown(value: object) -> str:
    """Return a value as one types it."""
    return value.mode if isinstance(value, ShardingConfig) else str(value)

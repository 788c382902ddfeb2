"""Searches for the longest row that fits: each length is planned, and the bytes of two plans give the next."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass

from thunder_memsave.finetune.plan.plan_run import RunPlan
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.planner.report.explain import in_units
from thunder_memsave.settings.problems import ConfigError

_CONSTANT = ("parameter", "buffer", "gradient", "accumulated", "optimizer", "other")
"""Kinds of bytes that do not grow with the row."""
_MOST_PLANS = 8
_SHORTEST = 64
"""Tokens of the shortest row that is tried."""
_CLOSE = 1.02
"""Ratio of lengths that is close enough."""
_MARGIN = 0.985
"""Part of what weights leave of the budget that is aimed at: the allocator's free blocks take some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestRow:
    """The longest row for which a plan was found."""

    num_tokens: int
    made: RunPlan
    """Its plan; if none fits, that of the shortest row that was tried."""
    refused_num_tokens: int | None
    """The shortest row that was tried and does not fit."""
    most: int | None
    """Positions of the model."""

    @property
    def sentence(self) -> str:
        """Say what was found, in a sentence."""
        if not self.made.fits:
            return (
                f"no row fits: one of {self.num_tokens:,} tokens was the shortest that was tried."
            )
        found = f"the longest row that fits has {self.num_tokens:,} tokens"
        if self.num_tokens == self.most:
            return (
                f"{found}: there the model's positions end (max_position_embeddings), before the memory does; "
                "--model.architecture.max_position_embeddings=N plans as if it had N."
            )
        if self.refused_num_tokens is None:
            return f"{found}, by {_CLOSE - 1:.0%} at most: the plans that were made show that the budget ends there."
        return f"{found}; one of {self.refused_num_tokens:,} does not fit."


def with_row(config: RunConfig, num_tokens: int) -> RunConfig:
    """Return the run with rows of another length."""
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, max_seq_length=num_tokens)
    )


def longest_row(
    plan: Callable[[int], RunPlan], *, start: int, most: int | None, say: Callable[[str], None]
) -> LongestRow:
    """Search for the longest row.

    Args:
        plan: Plans the run with rows of so many tokens.
        start: Tokens of the first row that is tried.
        most: Positions of the model; None: it has no end.
        say: Is told what each plan shows.

    Raises:
        ConfigError: there is no budget.
    """
    search = _Search(plan, most, say)
    guess: int | None = min(start, most or start)
    while guess is not None and len(search.points) < _MOST_PLANS:
        search.try_row(guess)
        guess = search.next_guess()
    assert search.best is not None, "one was tried"
    num_tokens, made = search.best
    return LongestRow(
        num_tokens=num_tokens, made=made, refused_num_tokens=search.shortest_refused, most=most
    )


@dataclass(frozen=True, slots=True)
class _Point:
    """A length that was tried, and the bytes that its plan shows."""

    fits: bool
    smallest_bytes: int
    budget_bytes: int
    constant_bytes: int

    @property
    def lacking_bytes(self) -> float:
        """Bytes by which the smallest plan exceeds what is aimed at."""
        aim = self.constant_bytes + _MARGIN * (self.budget_bytes - self.constant_bytes)
        return self.smallest_bytes - aim


class _Search:
    """The lengths that were tried; one plan is kept, for plans of large models take gigabytes of this machine."""

    def __init__(
        self, plan: Callable[[int], RunPlan], most: int | None, say: Callable[[str], None]
    ) -> None:
        self._plan, self._most, self._say = plan, most, say
        self.points: dict[int, _Point] = {}
        self.best: tuple[int, RunPlan] | None = None
        """The longest row that fits, or the shortest of those that do not."""

    @property
    def shortest_refused(self) -> int | None:
        """Tokens of the shortest row that was tried and does not fit."""
        return min((n for n, point in self.points.items() if not point.fits), default=None)

    def try_row(self, num_tokens: int) -> None:
        """Plan a row."""
        made = self._plan(num_tokens)
        if made.budget_bytes is None:
            raise ConfigError(
                "--longest needs a budget, and there is none: name one by --budget, such as 60GiB.",
                key="memory.budget",
            )
        by_kind = made.call.profile.peak_bytes_by_kind
        self.points[num_tokens] = _Point(
            fits=made.fits,
            smallest_bytes=made.smallest_bytes,
            budget_bytes=made.budget_bytes,
            constant_bytes=sum(by_kind.get(kind, 0) for kind in _CONSTANT),
        )
        if self._is_better(num_tokens, made):
            self.best = num_tokens, made
        verdict = "fits" if made.fits else "does not fit"
        self._say(
            f"a row of {num_tokens:,} tokens {verdict}: at least {in_units(made.smallest_bytes)} of "
            f"{in_units(made.budget_bytes)}"
        )
        gc.collect()

    def _is_better(self, num_tokens: int, made: RunPlan) -> bool:
        if self.best is None or made.fits is not self.best[1].fits:
            return self.best is None or made.fits
        return made.fits is (num_tokens > self.best[0])

    def next_guess(self) -> int | None:
        """Return the next length to try; None: the search is over."""
        low = max((n for n, point in self.points.items() if point.fits), default=0)
        high = self.shortest_refused
        if low == self._most or (high is not None and high <= max(low * _CLOSE, low + _SHORTEST)):
            return None
        guess = self._by_a_line()
        if high is not None and guess * _CLOSE >= high:
            guess = int(high / _CLOSE) if low == 0 else (low + high) // 2
        if guess <= low * _CLOSE:
            if high is None:
                return None  # the line ends here
            guess = min(
                int(low * _CLOSE) + 1, high - 1
            )  # which should not fit, and then nothing in between is left
        guess = _rounded(guess)
        guess = guess if self._most is None else min(guess, self._most)
        return None if guess in self.points else guess

    def _by_a_line(self) -> int:
        """Return the length at which a line through the two closest plans meets the budget."""
        points = sorted(self.points.items(), key=lambda each: abs(each[1].lacking_bytes))
        num_tokens, point = points[0]
        if len(points) > 1:
            other, of_other = points[1]
            slope = (point.smallest_bytes - of_other.smallest_bytes) / (num_tokens - other)
        else:
            slope = (point.smallest_bytes - point.constant_bytes) / num_tokens
        return max(_SHORTEST, int(num_tokens - point.lacking_bytes / max(slope, 1.0)))


def _rounded(num_tokens: int) -> int:
    """Round down, to half a percent, to a multiple of a power of two."""
    step = max(_SHORTEST, 1 << max(num_tokens // 200, 1).bit_length() - 1)
    return max(_SHORTEST, num_tokens // step * step)

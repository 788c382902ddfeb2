"""Follows one step of eager code that calls compiled pieces: what is live beside what the pieces' plans keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from thunder_memsave.budget.pieces.call_bytes import CallBytes
from thunder_memsave.measure.step_meter import StepMeter

Numbers: TypeAlias = Mapping[int, CallBytes]
"""The bytes that the plan of each piece takes."""
_Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the step: eager code between two pieces, or one of a piece's two halves."""

    own_bytes: int
    """Live bytes that are no piece's: the most of them in eager code, those at the start of a half."""
    open: tuple[int, ...]
    """Pieces that have run forward and not backward, once for each time; without the one whose half this is."""
    piece: int | None
    """The piece whose half this is; None: eager code."""
    phase: _Phase
    """The phase of the piece, or of the step."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Forward and backward of a step, part by part."""

    segments: tuple[Segment, ...]
    end_bytes: int
    """Live after backward: gradients of parameters."""
    running: Numbers
    """The plans that ran."""

    @property
    def pieces(self) -> frozenset[int]:
        """The pieces with a backward that were called."""
        return frozenset(s.piece for s in self.segments if s.piece is not None)

    def before(self, segment: Segment, numbers: Numbers) -> int:
        """Return what is live at the start of a half, the piece's own not counted; of eager code its peak."""
        kept = (numbers[p].kept_beside(self.running[p]) for p in segment.open)
        return segment.own_bytes + sum(kept)

    def during(self, segment: Segment, numbers: Numbers) -> int:
        """Return the peak of a segment."""
        nbytes = self.before(segment, numbers)
        if segment.piece is None:
            return nbytes
        own = numbers[segment.piece]
        if segment.phase == "forward":
            return nbytes + own.forward_bytes
        return nbytes + own.kept_beside(self.running[segment.piece]) + own.backward_bytes

    def halves(self, piece: int, phase: _Phase) -> Iterator[Segment]:
        """Yield the halves of a piece, one for each time that it is called."""
        return (s for s in self.segments if s.piece == piece and s.phase == phase)

    @property
    def eager_bytes(self) -> int:
        """The most that is live in eager code beside what pieces keep."""
        return max(s.own_bytes for s in self.segments if s.piece is None)


class StepFollower:
    """Notes when pieces run while a meter follows a step."""

    def __init__(self, meter: StepMeter) -> None:
        """`meter`: A new one."""
        self._meter = meter
        self._starts: list[tuple[int | None, int, _Phase]] = []
        """For each mark what begins there: a piece or None, the number of its call, and the phase."""
        self._phase: _Phase = "forward"
        self._num_calls = 0
        self.is_running = False
        self.is_spoiled = not meter.can_run
        """Whether something ran that was not followed."""

    @contextmanager
    def following(self, phase: _Phase) -> Iterator[None]:
        """Follow what runs here."""
        if self.is_spoiled or not self._meter.can_run:
            self.is_spoiled = True
            yield
            return
        self._phase = phase
        with self._meter.running():
            self._mark(None, 0)
            self.is_running = True
            try:
                yield
            finally:
                self.is_running = False
                self._mark(None, 0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens here, such as to compile a piece."""
        if not self.is_running:
            yield
            return
        with self._meter.paused():
            yield

    @contextmanager
    def forward(self, piece: int) -> Iterator[FollowedCall]:
        """Note that a piece's forward runs here."""
        self._num_calls += 1
        number = self._num_calls
        with self._half(piece, number, "forward"):
            yield FollowedCall(self, piece, number)

    @contextmanager
    def _half(self, piece: int, number: int, phase: _Phase) -> Iterator[None]:
        if not self.is_running:
            self.is_spoiled = True
            yield
            return
        self._starts.append((piece, number, phase))
        self._meter.mark()
        try:
            yield
        finally:
            self._mark(None, 0)

    def _mark(self, piece: int | None, number: int) -> None:
        self._starts.append((piece, number, self._phase))
        self._meter.mark()

    @property
    def has_begun(self) -> bool:
        """Whether a part of the step was followed."""
        return bool(self._starts)

    def step(self, running: Numbers, *, before_bytes: int, loss_bytes: int) -> MeasuredStep:
        """Return what was seen.

        Args:
            running: The plans that ran.
            before_bytes: Bytes that were live from the start, and are no constant of all steps.
            loss_bytes: Bytes that were live in backward, and were made when nothing was followed.
        """
        points = self._meter.points
        assert len(points) == len(self._starts), "each mark is a point"
        open_calls: dict[int, int] = {}
        segments = []
        for index, (piece, number, phase) in enumerate(self._starts[:-1]):
            of_call = piece is not None
            if of_call and phase == "backward":
                open_calls.pop(number, None)
            others = tuple(open_calls.values())
            live = points[index].live_bytes if of_call else points[index + 1].peak_bytes
            live += before_bytes
            kept = sum(running[p].kept_bytes for p in others)
            if piece is not None and phase == "backward":
                kept += running[piece].kept_bytes
            if phase == "backward":
                live += loss_bytes
            segments.append(Segment(live - kept, others, piece, phase))
            if piece is not None and phase == "forward":
                open_calls[number] = piece
        kept = sum(running[p].kept_bytes for p in open_calls.values())
        end_bytes = points[-1].live_bytes + before_bytes - kept
        return MeasuredStep(tuple(segments), end_bytes, running)


@dataclass(frozen=True, slots=True)
class FollowedCall:
    """A call whose backward is followed too."""

    follower: StepFollower
    piece: int
    number: int

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Note that the backward of the call runs here."""
        with self.follower._half(self.piece, self.number, "backward"):
            yield


Follow: TypeAlias = Callable[[], AbstractContextManager[FollowedCall | None]]
"""Makes the context in which a piece's forward runs; its value follows the backward, None: the step is not measured."""

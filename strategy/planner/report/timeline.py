"""Reduces the memory of a step to the points that a picture can show, without losing a peak."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from thunder_memsave.planner.graph import Program, StepMemory
from thunder_memsave.planner.report.explain import kind_name
from thunder_memsave.planner.simulate import Profile, live_bytes_by_kind

_MOST_POINTS = 800
_LAYER = re.compile(r"^(?:.*\.)?([A-Za-z_]\w*\.\d+)(?=\.|$)")

# From the bottom of the picture: memory that stays, then memory that comes and goes.
_ORDER = (
    "parameter",
    "buffer",
    "optimizer",
    "other",
    "accumulated",
    "batch",
    "gradient",
    "gathered",
    "cotangent",
    "activation",
    "temporary",
    "loss",
    "update",
    "inside",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A step in points, in the order in which they run."""

    kinds: list[str]
    """Names of the kinds of memory, from the bottom."""
    bytes: list[list[int]]
    """For each kind, its bytes at each point."""
    phases: list[tuple[str, int]]
    """Forward, loss, backward and optimizer, each with its first point; a phase without points is left out."""
    layers: list[str]
    """The layer, or module, that runs at each point; empty where unknown."""
    ops: list[str]
    """The operation of each point."""
    peak_point: int
    """The point of the largest sum, which is the predicted peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    phase: str
    parts: dict[str, int]
    layer: str
    op: str

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def timeline(program: Program, profile: Profile, memory: StepMemory) -> Timeline:
    """Return the points: of each run of steps the one that holds the most, so that the sums' maximum is the peak."""
    points = [*_thinned(_points(program, profile, memory))]
    kinds = [kind for kind in _ORDER if any(point.parts.get(kind) for point in points)]
    starts: dict[str, int] = {}
    for number, point in enumerate(points):
        starts.setdefault(point.phase, number)
    return Timeline(
        kinds=[kind_name(kind) for kind in kinds],
        bytes=[[point.parts.get(kind, 0) for point in points] for kind in kinds],
        phases=list(starts.items()),
        layers=[point.layer for point in points],
        ops=[point.op for point in points],
        peak_point=max(range(len(points)), key=lambda number: points[number].total),
    )


def _points(program: Program, profile: Profile, memory: StepMemory) -> list[_Point]:
    rows = {str(kind): row for kind, row in live_bytes_by_kind(program).items()}
    constant = {
        "optimizer": memory.optimizer_bytes,
        "other": memory.other_bytes,
        "accumulated": memory.gradient_bytes,
    }
    points = []
    for number, most in enumerate(profile.step_peak_bytes):
        live = {kind: row[number] for kind, row in rows.items()} | constant
        op = program.steps[number].op
        is_forward = number < program.num_forward
        points.append(
            _Point(
                phase="forward" if is_forward else "backward",
                parts={**live, "inside": max(most - sum(live.values()), 0)},
                layer=_layer(op.module),
                op=op.symbol,
            )
        )
    last = {kind: row[-1] for kind, row in rows.items()} | constant
    if profile.between_peak_bytes and program.num_forward < len(points):
        live = dict(points[program.num_forward].parts) | {"inside": 0, "cotangent": 0}
        rest = max(profile.between_peak_bytes - sum(live.values()), 0)
        between = _Point(phase="loss", parts={**live, "loss": rest}, layer="", op="loss")
        points.insert(program.num_forward, between)
    if profile.update_peak_bytes:
        rest = max(profile.update_peak_bytes - sum(last.values()), 0)
        points.append(
            _Point(phase="optimizer", parts={**last, "update": rest}, layer="", op="update")
        )
    return points


def _thinned(points: Sequence[_Point]) -> list[_Point]:
    """Take of each run of points, which never spans two phases, the largest."""
    size = -(-len(points) // _MOST_POINTS)
    kept = []
    start = 0
    while start < len(points):
        end = start + 1
        while end < min(start + size, len(points)) and points[end].phase == points[start].phase:
            end += 1
        kept.append(max(points[start:end], key=lambda point: point.total))
        start = end
    return kept


def _layer(module: str) -> str:
    """Return the repeated layer of a module, such as `layers.3`, or else its last name."""
    match = _LAYER.match(module)
    return match[1] if match else module.rpartition(".")[2]

"""Notes where the host waits for the device in a training step, and what the step launches.

On the CPU a tensor of the host looks like one of the device, so reads of both are noted, each with its line.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATORS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
"""Those of aten of which a kernel's result decides what the host does."""
_METHODS = ("tolist", "numpy", "cpu")
"""Copies to the host that on the CPU call no operator."""
_VIEWS = ("_unsafe_view", "alias", "detach", "device")
"""Operators that launch nothing, beside those that say so."""
_ON_THE_HOST = ("packing.py", "batches.py")
"""Files that lay out rows, on the host whatever the device."""


class DeviceReads(TorchDispatchMode):
    """While it is entered, counts operators, and the reads among them by `file:function`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self._replaced: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        for name in _METHODS:
            self._replaced[name] = getattr(Tensor, name)
            setattr(Tensor, name, self._noting(name))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name in _METHODS:
            setattr(Tensor, name, self._replaced.pop(name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _OPERATORS:
            self._note(name)
        if name not in _VIEWS and not func.is_view and not _lays_out():
            self.launched[name] += 1
        return func(*args, **(kwargs or {}))

    def _noting(self, name: str) -> Callable[..., Any]:
        method = self._replaced[name]

        def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._note(name)
            return method(tensor, *args, **kwargs)

        return noting

    def _note(self, name: str) -> None:
        self.reads[f"{name} in {_line_of_ours()}"] += 1


def _line_of_ours() -> str:
    """Return file and function of the innermost frame outside of torch, Lightning and this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.name != Path(__file__).name and "site-packages" not in path.parts:
            return f"{path.name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"


def _lays_out() -> bool:
    return _line_of_ours().partition(":")[0] in _ON_THE_HOST


@dataclass(frozen=True)
class Span:
    """What was noted in some steps of a run."""

    reads: Counter[str]
    launched: Counter[str]


class StepWatch:
    """A callback of a run: notes reads and launches from the start of one step until that of another."""

    noted: ClassVar[dict[int, Span]] = {}
    """By the first step of each span, of the last run."""

    def __init__(self, *, starts: list[int]) -> None:
        """Set the steps at whose start a span begins, or the last one ends.

        The step before the first is computed under the mode too, because its call is captured again.
        """
        self.starts = list(starts)
        self._mode = DeviceReads()
        StepWatch.noted = {}

    def on_train_batch_start(self, *, step: int) -> None:
        """End the span, and begin the next."""
        if step == self.starts[0] - 1:
            self._mode.__enter__()
        elif step == self.starts[-1]:
            self._mode.__exit__(None, None, None)
        elif step in self.starts:
            self._mode.reads, self._mode.launched = Counter(), Counter()
            StepWatch.noted[step] = Span(self._mode.reads, self._mode.launched)


def num_launched(reads: Span | DeviceReads, *, num_steps: int) -> float:
    """Return the operators per step."""
    return sum(reads.launched.values()) / num_steps

"""Decides at each call whether it is ordinary, captured or replayed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thunder_memsave.compiler.cuda_graphs.captured import Backward, CapturedCall, Forward
from thunder_memsave.compiler.cuda_graphs.host_waits import HostWaits
from thunder_memsave.compiler.cuda_graphs.runtime import NotCapturableError, Runtime
from thunder_memsave.errors import CompileError
from thunder_memsave.ops.added_gradients import Absent

NUM_ORDINARY = 2
"""Steps before the first capture: in them kernels are chosen, and libraries allocate what they keep."""
_MOST_CAPTURES = 3
"""Captures of one call; weights that move more often are not worth it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Replayed:
    """Marks what a replayed forward saved."""

    call: CapturedCall


class GraphedCall:
    """A compiled forward and backward that run as graphs where they can.

    A forward whose backward may still come keeps the graphs: what it saved is in their pool. Another forward before
    that is ordinary, and so is its backward.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        name: str,
        is_fixed: Sequence[bool],
        is_required: bool,
    ) -> None:
        """Capture nothing yet.

        Args:
            runtime: The device's.
            name: Of the call, for messages.
            is_fixed: For each input, whether it stays where it is.
            is_required: Whether a call that cannot be captured is an error, because graphs were asked for.
        """
        self._runtime, self._name, self._is_fixed = runtime, name, tuple(is_fixed)
        self._is_required = is_required
        self._captured: CapturedCall | None = None
        self._held: weakref.ref[Tensor] | None = None
        self._num_ordinary = self._num_captures = 0
        self._waits: dict[str, None] = {}
        self.why_off: str | None = None
        """Reason why no graph is made any more; None: they are, or will be."""

    @property
    def is_captured(self) -> bool:
        """Whether forward and backward are graphs by now."""
        return self._captured is not None and self._captured.backward is not None

    def forward(self, compute: Forward, inputs: Sequence[Any]) -> tuple[Any, tuple[Any, Any]]:
        """Run a forward, or replay it.

        Returns:
            Outputs that are the caller's, and what is saved for `backward`.

        Raises:
            CompileError: graphs were asked for, and it cannot be captured.
        """
        if not self._may_replay(inputs):
            return self._ordinary(lambda: compute(*inputs))  # type: ignore[no-any-return]
        if self._captured is None:
            try:
                self._capture(compute, inputs)
            except NotCapturableError as error:
                self._end(f"its forward cannot be captured: {error}")
                return compute(*inputs)  # type: ignore[no-any-return]
        call = self._captured
        assert call is not None
        outputs, read = call.run_forward(inputs)
        # Autograd holds it as long as it may call backward: until it has, unless `retain_graph` is set.
        held = torch.empty(0)
        self._held = weakref.ref(held)
        return outputs, ([*read, held], _Replayed(call))

    def backward(
        self,
        differentiate: Backward,
        saved: Any,
        cotangents: Sequence[Any],
        wanted: Collection[int],
    ) -> Sequence[Any]:
        """Run the backward of an ordinary forward, or replay that of a replayed one.

        Raises:
            CompileError: it cannot be captured, and its forward has run as a graph.
        """
        _, numbers = saved
        if not isinstance(numbers, _Replayed):
            gradients = self._ordinary(lambda: differentiate(saved, cotangents))
            self._num_ordinary += 1
            return gradients  # type: ignore[no-any-return]
        # A graph cannot tell whether the next backward gets them.
        given = [c.zeros() if isinstance(c, Absent) else c for c in cotangents]
        try:
            return numbers.call.run_backward(differentiate, given, wanted)
        except NotCapturableError as error:
            self.why_off = str(error)
            raise CompileError(
                f"the backward of {self._name} cannot be captured as a CUDA graph: {error}. "
                "Set strategy.cuda_graphs to false."
            ) from error

    def _may_replay(self, inputs: Sequence[Any]) -> bool:
        if self.why_off is not None or self._num_ordinary < NUM_ORDINARY:
            return False
        if self._held is not None and self._held() is not None:
            return False
        call = self._captured
        if call is not None and (call.backward is None or not call.is_at(inputs)):
            # What a forward saved went without its backward; or a weight was moved.
            self._captured = None
        if self._waits:
            self._end(f"it makes the host wait: {', '.join(self._waits)}")
        elif self._captured is None and self._num_captures == _MOST_CAPTURES:
            self._end(
                f"it was captured {_MOST_CAPTURES} times: weights were moved, or a forward had no backward"
            )
        return self.why_off is None

    def _ordinary(self, run: Callable[[], Any]) -> Any:
        """Run without a graph; before the first capture note whether it could be one."""
        if self.why_off is not None or self._num_ordinary != NUM_ORDINARY - 1:
            return run()
        with HostWaits() as noted:
            result = run()
        self._waits.update(noted.names)
        return result

    def _capture(self, compute: Forward, inputs: Sequence[Any]) -> None:
        self._num_captures += 1
        self._captured = CapturedCall.of(self._runtime, compute, inputs, is_fixed=self._is_fixed)

    def _end(self, reason: str) -> None:
        """Make no graphs any more.

        Raises:
            CompileError: they were asked for.
        """
        self.why_off, self._captured = reason, None
        if self._is_required:
            raise CompileError(
                f"strategy.cuda_graphs is true, but {self._name} is no CUDA graph: {reason}. Set it to auto or false."
            )
        _log.warning("no CUDA graphs of %s: %s", self._name, reason)

    def drop(self, reason: str) -> None:
        """Make no graphs any more, and free their pool once no backward needs it."""
        if self.why_off is None:
            self.why_off, self._captured = reason, None
            _log.warning("no CUDA graphs of %s any more: %s", self._name, reason)

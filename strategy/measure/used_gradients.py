"""The cost of adding a gradient to its parameter's, and of updating a parameter, which can only run in a backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from thunder.core.symbol import BoundSymbol

from thunder_memsave.measure.layouts import Value
from thunder_memsave.measure.op_profile import OpProfile
from thunder_memsave.ops.added_gradients import adds_gradient
from thunder_memsave.ops.updated_parameters import is_copied, update_of, updates_parameter


def uses_gradient(bsym: BoundSymbol) -> bool:
    """Return whether a symbol is the one that uses a gradient, its first argument."""
    return adds_gradient(bsym) or updates_parameter(bsym)


class UsedGradientRules:
    """Profiles the use of a gradient, which makes nothing."""

    def __init__(self, allocated_bytes: Callable[[int, str], int]) -> None:
        """`allocated_bytes`: the bytes that the planned device's allocator counts for a request on a type of device."""
        self._allocated_bytes = allocated_bytes

    def __call__(self, bsym: BoundSymbol, arguments: Sequence[Value]) -> OpProfile | None:
        """Return the profile; None for any other symbol."""
        if not uses_gradient(bsym):
            return None
        layout = arguments[0].layout
        nbytes = math.prod(layout.shape) * layout.dtype.itemsize
        peak_bytes, moved_bytes = 0, 3 * nbytes  # both gradients are read, one is written
        if updates_parameter(bsym):
            update = update_of(bsym)
            peak_bytes, moved_bytes = update.peak_bytes, update.moved_bytes
            if is_copied(layout.shape, layout.stride, update):
                peak_bytes += self._allocated_bytes(nbytes, layout.device.partition(":")[0])
                moved_bytes += 2 * nbytes
        return OpProfile(
            results=(),
            num_argument_storages=1,
            made_bytes=(),
            peak_bytes=peak_bytes,
            moved_bytes=moved_bytes,
            dtype=str(layout.dtype).removeprefix("torch."),
        )

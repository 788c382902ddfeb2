"""The cost of adding a gradient to its parameter's, which can only run in a backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thunder.core.symbol import BoundSymbol

from thunder_memsave.measure.layouts import Value
from thunder_memsave.measure.op_profile import OpProfile
from thunder_memsave.ops.added_gradients import adds_gradient


def added_gradient(bsym: BoundSymbol, arguments: Sequence[Value]) -> OpProfile | None:
    """Return the profile: both gradients are read, one is written, nothing is made; None for any other symbol."""
    if not adds_gradient(bsym):
        return None
    layout = arguments[0].layout
    return OpProfile(
        results=(),
        num_argument_storages=1,
        made_bytes=(),
        moved_bytes=3 * math.prod(layout.shape) * layout.dtype.itemsize,
        dtype=str(layout.dtype).removeprefix("torch."),
    )

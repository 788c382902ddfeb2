"""The cost of what is done with gradients and can only run in a backward.

A gradient is added to its parameter's, or updates it, or is added to what the caller gives of an output, if anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from thunder.core.symbol import BoundSymbol

from thunder_memsave.measure.layouts import Value, layout_of, numel_of
from thunder_memsave.measure.op_profile import OpProfile
from thunder_memsave.ops.added_gradients import adds_gradient, adds_if_given
from thunder_memsave.ops.updated_parameters import is_copied, update_of, updates_parameter


def uses_gradient(bsym: BoundSymbol) -> bool:
    """Return whether a symbol is the one that uses a gradient, its first argument."""
    return adds_gradient(bsym) or updates_parameter(bsym)


class UsedGradientRules:
    """Profiles the use of a gradient, which makes nothing; and a sum where the caller gives nothing to add."""

    def __init__(self, allocated_bytes: Callable[[int, str], int]) -> None:
        """`allocated_bytes`: the bytes that the planned device's allocator counts for a request on a type of device."""
        self._allocated_bytes = allocated_bytes

    def __call__(self, bsym: BoundSymbol, arguments: Sequence[Value]) -> OpProfile | None:
        """Return the profile; None for any other symbol."""
        if adds_if_given(bsym):
            return self._sum(arguments, bsym.args[2])
        if not uses_gradient(bsym):
            return None
        layout = arguments[0].layout
        nbytes = numel_of(layout) * layout.dtype.itemsize
        peak_bytes, moved_bytes = 0, 3 * nbytes  # both gradients are read, one is written
        if updates_parameter(bsym):
            update = update_of(bsym)
            peak_bytes, moved_bytes = update.peak_bytes, update.moved_bytes
            if is_copied(layout.shape, layout.stride, update):
                peak_bytes += self._allocated_bytes(nbytes, layout.device.partition(":")[0])
                moved_bytes += 2 * nbytes
        return OpProfile(
            results=(),
            num_argument_storages=len({a.storage for a in arguments}),
            made_bytes=(),
            peak_bytes=peak_bytes,
            moved_bytes=moved_bytes,
            dtype=str(layout.dtype).removeprefix("torch."),
        )

    def _sum(self, arguments: Sequence[Value], stride: Sequence[int]) -> OpProfile:
        """Profile a sum without its second term: the first itself, or with zeros of other strides."""
        layout, dtype = arguments[0].layout, arguments[0].layout.dtype
        num_storages = len({a.storage for a in arguments})
        named = str(dtype).removeprefix("torch.")
        if layout.stride == tuple(stride):
            return OpProfile(
                results=(Value(layout, 0),),
                num_argument_storages=num_storages,
                made_bytes=(),
                dtype=named,
            )
        terms = [
            torch.empty_strided(layout.shape, s, dtype=dtype, device="meta")
            for s in (layout.stride, stride)
        ]
        made = layout_of(terms[0] + terms[1])._replace(device=layout.device)
        nbytes = self._allocated_bytes(made.storage_bytes, layout.device.partition(":")[0])
        return OpProfile(
            results=(Value(made, num_storages),),
            num_argument_storages=num_storages,
            made_bytes=(nbytes,),
            peak_bytes=2 * nbytes,
            moved_bytes=4 * nbytes,
            dtype=named,
        )

"""Facts of the symbols of an executed trace that several passes ask for."""

from __future__ import annotations

from thunder_memsave import compat

compat.apply()

from thunder.core.proxies import FutureTensorProxy, TensorProxy  # noqa: E402
from thunder.core.symbol import BoundSymbol  # noqa: E402


def is_tensor(proxy: object) -> bool:
    """Whether it stands for a tensor, there already or on its way."""
    return isinstance(proxy, TensorProxy | FutureTensorProxy)


def written_in_place(bsym: BoundSymbol) -> str | None:
    """Name of the tensor into which this symbol copies; None: it writes to nothing that exists."""
    # The exact name: `copy_with_setitem_impl` and others that begin alike make a new tensor.
    return str(bsym.args[1].name) if bsym.sym.name == "copy_" else None

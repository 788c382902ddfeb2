"""Thunder 0.2.6 keeps the derivatives of the operations that it registers by itself under their bare names.

`torch.cross` and `torch.linalg.cross`, `torch.norm` and `torch.linalg.norm` and 20 more pairs share one name, and the
one registered last serves both (`thunder/torch/__init__.py: register_default_torch_op`, operators `<name>_vjp`): the
gradient of `torch.cross(a, b)` is silently that of `torch.linalg.cross`.

Delete this file when `tests/compat/test_derivatives_by_name.py` says that Thunder does it itself.
"""

from __future__ import annotations

import importlib.metadata
from functools import partial
from typing import Any

from packaging.version import Version


def is_needed() -> bool:
    """Return whether the installed version has the defect."""
    return Version(importlib.metadata.version("lightning-thunder")) <= Version("0.2.6")


def apply() -> None:
    """Register a derivative under a unique name for every operation whose derivative was replaced."""
    if not is_needed():
        return
    from thunder.executors.torchex import _always_executable, ex
    from thunder.torch import _vjp_impl, backward_adaptor

    for symbol in replaced_derivatives():
        function = getattr(symbol.meta, "__torchfn")
        operator = ex.register_operator(
            f"{symbol.id.replace('.', '_')}_own_vjp",
            meta=backward_adaptor(function),
            fn=partial(_vjp_impl, function),
        )
        ex.register_implementation(operator.id, operator, checker=_always_executable)
        _derivatives()[symbol.id] = operator


def replaced_derivatives() -> list[Any]:
    """Return the symbols whose derivative is executed as another function's."""
    from thunder.core.prims import OpTags
    from thunder.core.symbol import Symbol
    from thunder.executors.torchex import ex
    from thunder.torch import _torch_to_thunder_function_map as symbols

    known = (s for s in symbols.values() if isinstance(s, Symbol))
    automatic = {s.id: s for s in known if OpTags.AUTO_REGISTERED in (s.tags or ())}
    return [
        symbol
        for symbol in automatic.values()
        if (derivative := _derivatives().get(symbol.id)) is not None
        and ex.implmap[derivative.id].symbol is not derivative
    ]


def _derivatives() -> dict[Any, Any]:
    from thunder.core.transforms import backward_impls

    return backward_impls  # type: ignore[no-any-return]

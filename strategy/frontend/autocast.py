"""Makes `torch.autocast` explicit: casts the arguments of each operation as autocast does.

Thunder has rules of its own for a few operations and no notion of nested contexts. Here the dtype that PyTorch's
autocast gave the result (known from the capture) decides: operations of the lower-precision list get their floating
arguments cast; any other operation whose result dtype would differ is rerun with arguments cast to that dtype.
The lists are those of PyTorch's documentation ("Automatic Mixed Precision package", op eligibility).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor
from torch.utils._pytree import tree_map

from thunder_memsave.ops.families.packed_attention import packed_attention
from thunder_memsave.ops.families.windowed_attention import windowed_attention

_LOWER_PRECISION: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(F, f"conv{n}d") for n in (1, 2, 3)),
        *(getattr(F, f"conv_transpose{n}d") for n in (1, 2, 3)),
        F.linear,
        F.scaled_dot_product_attention,
        operator.matmul,
        packed_attention,
        windowed_attention,
        torch.addbmm,
        torch.addmm,
        torch.addmv,
        torch.baddbmm,
        torch.bmm,
        torch.einsum,
        torch.matmul,
        torch.mm,
        torch.mv,
        *(
            getattr(Tensor, name)
            for name in (
                "__matmul__",
                "__rmatmul__",
                "addbmm",
                "addmm",
                "baddbmm",
                "bmm",
                "matmul",
                "mm",
                "mv",
            )
        ),
    }
)
_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


class Autocast:
    """The stack of autocast contexts around the node that is being lowered."""

    def __init__(self) -> None:
        """Start from the contexts that are open now, around the call that was captured."""
        self._stack: list[Mapping[str, torch.dtype | None]] = [
            {kind: _ambient(kind) for kind in ("cpu", "cuda")}
        ]

    @property
    def enabled(self) -> bool:
        """Whether any device type autocasts at this point of the graph."""
        return any(dtype is not None for dtype in self._stack[-1].values())

    def handles(self, target: Any) -> bool:
        """Return whether `target` enters or leaves a context."""
        return target is _ENTER or target is _EXIT

    def switch(self, target: Any, args: Sequence[Any]) -> object:
        """Enter or leave a context where the graph does."""
        if target is _EXIT:
            self._stack.pop()
            return None
        device_type, dtype, enabled, _ = args
        value = (dtype or torch.get_autocast_dtype(device_type)) if enabled else None
        self._stack.append({**self._stack[-1], device_type: value})
        return object()

    @contextmanager
    def as_eager(self) -> Iterator[None]:
        """Autocast as eager does at this point of the graph."""
        with ExitStack() as stack:
            for device_type, dtype in self._stack[-1].items():
                if dtype is not None:
                    context = torch.autocast(device_type, dtype, cache_enabled=False)
                    stack.enter_context(context)
            yield

    def arguments(
        self,
        function: Callable[..., Any],
        expected: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments, cast if `function` runs in lower precision under the current context."""
        if not self.enabled or function not in _LOWER_PRECISION or not isinstance(expected, Tensor):
            return args, kwargs
        dtype = self._stack[-1].get(expected.device.type)
        if dtype is None or expected.dtype != dtype:
            return args, kwargs
        return self.cast_to(dtype, args, kwargs)

    def cast_to(
        self, dtype: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Cast every floating tensor argument (float64 excepted, as PyTorch does)."""

        def cast(value: Any) -> Any:
            if isinstance(value, TensorProxy) and dtypes.to_torch_dtype(value.dtype) in _CASTABLE:
                return value.to(dtype)
            return value

        return tree_map(cast, tuple(args)), tree_map(cast, dict(kwargs))


def _ambient(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None

"""A fence: what is computed from a value behind it is neither merged with what was computed before, nor moved ahead.

bw_f0_t1 = fence(t1, g)     # t1 itself, but no pass knows, and not before g is there
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from thunder_memsave import compat

compat.apply()

from thunder.core.proxies import Proxy, TensorProxy  # noqa: E402
from thunder.core.symbol import BoundSymbol, BoundSymbolTag  # noqa: E402
from thunder.extend import OperatorExecutor, register_executor  # noqa: E402

_executor = OperatorExecutor("thunder_memsave_fence", version="0")
register_executor(_executor)


def _fence(value: Tensor, after: Tensor | None) -> Tensor:
    return value


fence = _executor.register_operator(
    "fence", meta=lambda value, after: TensorProxy(like=value), fn=_fence
)
"""`(value, another or None) -> value`, the same tensor."""


class Fences:
    """Those in front of the clones that one reader needs."""

    def __init__(self, number: int, after: TensorProxy | None) -> None:
        """`number` tells the names of these fences from others'; `after`: what they wait for."""
        self._number, self._after = number, after
        self._behind: dict[str, Proxy] = {}

    def put_before(self, values: Iterable[TensorProxy]) -> Iterator[BoundSymbol]:
        """Yield a fence for each value that has none."""
        for value in values:
            if value.name not in self._behind:
                behind = value.replace_name(f"bw_f{self._number}_{value.name}")
                self._behind[value.name] = behind
                made = fence.bind(value, self._after, output=behind)
                made.tags.update((BoundSymbolTag.BACKWARD, BoundSymbolTag.RECOMPUTE_IN_BACKWARD))
                yield made

    @property
    def names(self) -> dict[str, Proxy]:
        """What values are called behind their fences."""
        return self._behind

"""`checkpoint` for eager code: backward computes a function again instead of keeping what it saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from thunder_memsave.fp8.kernels.te_scaling_record import ScalingRecord

P = ParamSpec("P")
T = TypeVar("T")


def checkpoint(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `fn(*args, **kwargs)` and keep its arguments, but nothing it saves for backward, which computes that again.

    For code that is not captured, TransformerEngine's own modules among it; in a model that the strategy compiles, the
    memory plan decides. Non-reentrant: no argument needs a gradient, calls may be nested, `torch.autograd.grad` and
    `retain_graph=True` work. The recompute ends with the last tensor that is missing. It has the forward's random
    numbers (of the CPU, the current CUDA device and those of the tensors), autocast state and fp8 scales, and leaves
    all of these as they are.

    Args:
        fn: gives the same results each time it is called, up to its random numbers. What it changes besides its
            result (a counter, the running mean of a batch norm) is changed again by the recompute.
        args: of any structure of lists, tuples and dicts.
        kwargs: likewise; all belong to `fn`.

    Returns:
        What `fn` returns, of any structure.

    Raises:
        torch.utils.checkpoint.CheckpointError: in backward; the recompute saved another number of tensors, or tensors
            of other shapes, dtypes or devices, of which the first is named.
    """
    if torch.compiler.is_compiling():
        # Capture knows PyTorch's function, and honours its regions.
        again: Callable[..., T] = torch.utils.checkpoint.checkpoint
        # Its own keywords are among those that `fn` may have.
        return again(lambda *given: fn(*given, **kwargs), *args, use_reentrant=False)
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    region = _Region(fn, args, kwargs, structure)
    leaves += _mark_of_current_device(leaves)
    return torch.utils.checkpoint.checkpoint(region, *leaves, use_reentrant=False)  # type: ignore[no-any-return]


class _Region:
    """One call: forward gets what the caller gave, each recompute gets the leaves of that.

    PyTorch saves positional tensors like any that backward needs: they are freed with the graph, belong to an enclosing
    region, and must not be overwritten. Keyword arguments, and tensors in lists, it would only hold.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        structure: TreeSpec,
    ) -> None:
        self._fn, self._structure = fn, structure
        self._given: tuple[Sequence[Any], Mapping[str, Any]] | None = (args, kwargs)
        self._scaling = ScalingRecord()

    def __call__(self, *leaves: Any) -> Any:
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
            with self._scaling.recording():
                return self._fn(*args, **kwargs)
        args, kwargs = tree_unflatten(leaves[: self._structure.num_leaves], self._structure)
        with self._scaling.replaying():
            return self._fn(*args, **kwargs)


def _mark_of_current_device(leaves: Sequence[Any]) -> list[Tensor]:
    """An empty tensor where no other says that random numbers may be drawn on the current CUDA device."""
    if not torch.cuda.is_initialized():
        return []
    current = torch.device("cuda", torch.cuda.current_device())
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    if current in devices or any(d.type not in ("cpu", "cuda") for d in devices):
        return []
    return [torch.empty(0, device=current)]

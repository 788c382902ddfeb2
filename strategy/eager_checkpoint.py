"""`checkpoint` for eager code: backward recomputes a function instead of keeping what it saved."""

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
    """Call `fn(*args, **kwargs)`, keep only its arguments, and recompute it in backward.

    For code that is not captured, such as TransformerEngine's own modules; in a model that the strategy compiles, the
    memory plan decides. Non-reentrant: no argument needs a gradient, calls may be nested, `torch.autograd.grad` and
    `retain_graph=True` work. The recompute stops at the last tensor that backward needs. It uses forward's random
    numbers (of the CPU, the current CUDA device and the devices of the tensors), autocast state and fp8 scales, and
    changes none of these.

    Args:
        fn: A function that gives the same results each time, given the same random numbers. Its side effects (a
            counter, the running mean of a batch norm) happen again in the recompute.
        args: Positional arguments: any structure of lists, tuples and dicts.
        kwargs: Keyword arguments, all of them for `fn`.

    Returns:
        The result of `fn`, of any structure.

    Raises:
        torch.utils.checkpoint.CheckpointError: In backward: the recompute saved another number of tensors, or tensors
            of other shapes, dtypes or devices; the message names the first.
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
    """One call: forward gets the caller's arguments, each recompute gets them rebuilt from their leaves.

    PyTorch saves positional tensors like any that backward needs: they are freed with the graph, belong to an enclosing
    region, and must not be overwritten. Keyword arguments, and tensors in lists, would only be referenced.
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
    """Return an empty tensor on the current CUDA device, so that its generator is saved, if no leaf is there."""
    if not torch.cuda.is_initialized():
        return []
    current = torch.device("cuda", torch.cuda.current_device())
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    if current in devices or any(d.type not in ("cpu", "cuda") for d in devices):
        return []
    return [torch.empty(0, device=current)]

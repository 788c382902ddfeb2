"""Takes an optimizer's step with some of its parameters, where their updates read nothing of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from thunder_memsave.optim.by_rows import ByRows
from thunder_memsave.optim.muon import MuonByRows
from thunder_memsave.settings.problems import ConfigError

_NOT_ALONE = (LBFGS, SparseAdam)
"""Optimizers of PyTorch that compute with all parameters at once, or whose gradients have no rows to copy."""


def refuse_updates_at_once(optimizer: Optimizer, *, does: str, key: str, instead: str) -> None:
    """Refuse an optimizer that may compute with all parameters at once.

    Args:
        optimizer: Of any class.
        does: What the setting does, for the message.
        key: The setting.
        instead: What to set it to with this optimizer.

    Raises:
        ConfigError: it is not known that it updates each parameter by itself.
    """
    kind = type(optimizer)
    is_known = kind.__module__.startswith("torch.optim") or issubclass(kind, ByRows | MuonByRows)
    if not is_known or isinstance(optimizer, _NOT_ALONE):
        raise ConfigError(
            f"{key} {does}, which is known to change no number for those of torch.optim but LBFGS and SparseAdam, and "
            f"for those of thunder_memsave.optim; {kind.__name__} may compute with all parameters at once: use one of "
            f"these, or set {key} to {instead}.",
            key=key,
        )


@contextmanager
def numbers_kept(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer of ours know the number of each parameter while it sees only some of them."""
    if not isinstance(optimizer, ByRows) or optimizer.numbers is not None:
        yield
        return
    optimizer.numbers = optimizer.numbered()
    try:
        yield
    finally:
        optimizer.numbers = None


@contextmanager
def only(optimizer: Optimizer, piece: Sequence[Tensor]) -> Iterator[None]:
    """Let an optimizer know no other parameters."""
    chosen = {id(p) for p in piece}
    whole = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, whole, strict=True):
        group["params"] = [p for p in parameters if id(p) in chosen]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters

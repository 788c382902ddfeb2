"""Cross entropy on proxies, for the cases in which Thunder's rule fails in backward or differs from PyTorch.

Thunder 0.2.6 fails in backward with `reduction="sum"` and with targets of more than one dim, and includes ignored rows
in the term that `label_smoothing` adds to the loss.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

from thunder_memsave.ops.operation import Call, Operation


def cross_entropy(
    logits: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> TensorProxy:
    """Record `torch.nn.functional.cross_entropy` on proxies; the arguments are the same."""
    if size_average is not None or reduce is not None:
        raise NotImplementedError("size_average and reduce are deprecated, use reduction")
    if dtypes.is_float_dtype(target.dtype):
        return ltorch.cross_entropy(
            logits, target, weight, None, ignore_index, None, reduction, label_smoothing
        )
    rows, classes = _rows(logits), target.reshape(-1)
    if label_smoothing == 0.0 and reduction == "mean":
        return ltorch.cross_entropy(rows, classes, weight, ignore_index=ignore_index)
    if label_smoothing == 0.0:
        losses = ltorch.cross_entropy(
            rows, classes, weight, ignore_index=ignore_index, reduction="none"
        )
        return losses.sum() if reduction == "sum" else losses.reshape(target.shape)
    losses, weights = _smoothed(rows, classes, weight, ignore_index, label_smoothing)
    if reduction == "mean":
        return losses.sum() / weights.sum()
    return losses.sum() if reduction == "sum" else losses.reshape(target.shape)


def _rows(logits: TensorProxy) -> TensorProxy:
    """Reshape `(classes)`, `(n, classes)` or `(n, classes, d1, ...)` to `(rows, classes)`."""
    if logits.ndim == 1:
        return logits.unsqueeze(0)
    if logits.ndim == 2:
        return logits
    last = logits.permute(0, *range(2, logits.ndim), 1)
    return last.reshape(-1, last.shape[-1])


def _smoothed(
    rows: TensorProxy,
    classes: TensorProxy,
    weight: TensorProxy | None,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[Any, Any]:
    """Return the loss of each row, and its weight in the mean; both are zero in ignored rows."""
    log_probabilities = ltorch.log_softmax(rows, dim=1)
    counted = classes != ignore_index
    safe = ltorch.where(counted, classes, 0)
    picked = ltorch.gather(log_probabilities, 1, safe.unsqueeze(1)).squeeze(1)
    every = log_probabilities if weight is None else log_probabilities * weight
    ones = ltorch.ones(*safe.shape, device=rows.device, dtype=rows.dtype)
    weights = ltorch.where(counted, ones if weight is None else weight[safe], 0.0)
    spread = ltorch.where(counted, every.sum(1), 0.0) * (label_smoothing / rows.shape[1])
    return -(picked * weights * (1.0 - label_smoothing) + spread), weights


def _lower(call: Call) -> TensorProxy:
    return cross_entropy(*call.args, **call.kwargs)


def _of_log_probabilities(call: Call) -> str:
    """Its derivative takes no missing weight."""
    return "the log-probabilities"


OPERATIONS = (
    Operation(name="cross_entropy", functions=(F.cross_entropy,), lower=_lower),
    Operation(
        name="nll_loss",
        functions=(F.nll_loss,),
        runs_torchs_own=True,
        wrong_gradient=_of_log_probabilities,
    ),
)

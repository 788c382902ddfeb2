"""Chooses the format of bytes of each frozen weight: of linears, and of stacks of matrices such as experts'."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from thunder_memsave.sharding.rows import whole_shape
from thunder_memsave.sharding.sharded_parameter import stored_weight
from thunder_memsave.stored_weights.format import DTYPES, StoredFormat

_SKIPPED = "lm_head"
"""The output layer stays as it is, as in transformers with bitsandbytes: its errors go straight into the logits."""
_LEFT = "_thunder_memsave_left_as_it_is"


def leave_as_it_is(module: nn.Module) -> None:
    """Note that the weights of this module itself are not to be kept as bytes; a model's makers may ask for it."""
    setattr(module, _LEFT, True)


def is_candidate(name: str, linear: nn.Linear) -> bool:
    """Return whether the weight of a linear may be kept as bytes, whatever its length."""
    is_left = name.rpartition(".")[2] == _SKIPPED or _LEFT in vars(linear)
    return not is_left and _is_number(linear.weight)


def format_of_linear(kept_in: StoredFormat, linear: nn.Linear) -> StoredFormat | None:
    """Return the format; None if the inputs are not whole blocks."""
    _, num_inputs = _shape(linear.weight)
    return kept_in if num_inputs % kept_in.block == 0 else None


def format_of_stack(
    kept_in: StoredFormat, owner: nn.Module, parameter: nn.Parameter
) -> StoredFormat | None:
    """Return the format of a parameter with at least two matrices; None if it is to stay as it is.

    The weights of torch's own layers and of convolutions are no such stacks. Which of the two last dims are the inputs
    is what `owner.is_transposed` says, as transformers' experts do; else, and where these are not whole blocks, it is
    the last that has whole blocks. Numbers depend on it, products do not.
    """
    if not kept_in.takes_stacks or _LEFT in vars(owner) or not _is_number(parameter):
        return None
    shape = _shape(parameter)
    is_layer = type(owner).__module__.startswith("torch.nn.") or isinstance(owner, _ConvNd)
    if len(shape) != 3 or shape[0] < 2 or is_layer:
        return None
    ways = [(kept_in, shape[2]), (kept_in.transposed, shape[1])]
    if getattr(owner, "is_transposed", False):
        ways.reverse()
    return next((found for found, length in ways if length % kept_in.block == 0), None)


def _is_number(parameter: Tensor) -> bool:
    is_known = parameter.dtype in DTYPES or stored_weight(parameter) is not None
    return is_known and parameter.numel() > 0


def _shape(parameter: Tensor) -> tuple[int, ...]:
    stored = stored_weight(parameter)
    return tuple(whole_shape(parameter) if stored is None else stored.shape)

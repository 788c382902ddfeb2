"""Says of a use of rows what was asked, what is true, and what to do instead."""

from __future__ import annotations

from torch import Tensor

from thunder_memsave.errors import ThunderMemsaveError


class ShardedParameterError(ThunderMemsaveError, ValueError):
    """This rank's rows of a weight were used as if they were the whole weight."""

    code = None  # the traceback shows the user


def not_by_rows(operation: str, of: Tensor) -> str:
    """Return the message for an operation on a parameter's rows that is correct on the whole weight only."""
    return (
        f"{operation}() was asked to use {_rows_held(of, 'outside the compiled forward')} Run it inside "
        "`with strategy.summon_full(module):`, on every rank, which gathers the whole weights."
    )


def into_a_file(of: Tensor) -> str:
    """Return the message for rows that were to be written to a file."""
    return (
        f"Refused to write rows of {_rows_held(of, 'to a file as if they were all of it')} Gather the whole "
        "weights first, on every rank: `with strategy.summon_full(module):` around the call that writes, such as "
        "save_pretrained, or strategy.get_module_state_dict(module), or `value.full_tensor()`, or fabric.save, "
        "which gathers. To write only these rows, pass `value.data`."
    )


def not_a_value(of: Tensor) -> str:
    """Return the message for a gather of what was computed from rows, whose layout is not known."""
    return (
        f"full_tensor() was asked to gather what was computed from {_rows_held(of, 'in state_dict()')} Gather the "
        "value itself first, `state_dict()[name].full_tensor()` on every rank, and compute with that."
    )


def gradient_not_by_rows(operation: str, of: Tensor) -> str:
    """Return the message for an operation on a gradient's rows that is correct on the whole gradient only."""
    return (
        f"{operation}() was asked to use the gradient of {_rows_held(of, 'as if it were whole')} Norms, sums, means, "
        "extremes, all(), any() and equal() without a dim are those of the whole gradient, if every rank calls them; "
        "fabric.clip_gradients clips all gradients. A plain tensor of this rank's rows is `p.grad.to_local()`."
    )


def _rows_held(of: Tensor, where: str) -> str:
    rows = vars(of)
    whole = rows["unsharded_shape"]
    return (
        f"{rows['_parameter_name']!r} of shape {tuple(whole)} {where}; this rank holds only {rows['_num_real_rows']} "
        f"of its {whole[0]} rows."
    )

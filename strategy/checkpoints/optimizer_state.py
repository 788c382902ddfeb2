"""An optimizer's state under parameter names, independent of ranks, order and world size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_memsave.checkpoints.manifest import DamagedCheckpointError
from thunder_memsave.checkpoints.module_state import Problem
from thunder_memsave.checkpoints.sources import TensorSpec
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.optim.by_rows import ByRows
from thunder_memsave.optim.loading import StateError, other_states, state_device
from thunder_memsave.optim.on_host import settle
from thunder_memsave.sharding.rows import (
    gather_rows,
    is_state_of_rows,
    local_rows,
    own_rows,
    take_rows,
    whole_shape,
)
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedState:
    """An optimizer's state dict with names instead of PyTorch's positions."""

    state: dict[str, dict[str, Any]]
    """Tensors or plain values, by parameter name and the optimizer's own key."""
    param_groups: list[dict[str, Any]]
    """Plain values only; `params` are names."""

    def as_dict(self) -> dict[str, Any]:
        """Return the layout of PyTorch's and Lightning's own name-keyed checkpoints."""
        return {"state": self.state, "param_groups": self.param_groups}


def named_parameters_of(optimizer: Optimizer, modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the optimizer's parameters by their first name in the one module that has them all.

    Raises:
        ValueError: no module in the state has all of them, so they have no names.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for module in modules:
        names = {id(p): name for name, p in module.named_parameters()}
        if all(id(p) in names for p in trained):
            return {names[id(p)]: p for p in trained}
    raise ValueError(
        f"{type(optimizer).__name__} trains parameters that no module in the checkpoint's state "
        "has; save and load it together with its module: {'model': model, 'optimizer': optimizer}."
    )


def named_state_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> NamedState:
    """Return the optimizer's state as it is: tensors of shards have the shard's shape, with padding.

    Raises:
        ValueError: the state of a sharded parameter is neither shaped like the shard nor a single number.
    """
    settle(optimizer)
    name_of = {id(p): name for name, p in parameters.items()}
    groups = [
        {
            key: [name_of[id(p)] for p in value] if key == "params" else _plain(key, value)
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    state = {
        name: dict(optimizer.state[p]) for name, p in parameters.items() if p in optimizer.state
    }
    for name, values in state.items():
        for key, value in values.items():
            _refuse_unshardable(optimizer, name, key, value, parameters[name])
    return NamedState(state=state, param_groups=groups)


def gather_optimizer_state(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    data_parallel: DataParallel | None,
    *,
    keep: bool = True,
) -> NamedState:
    """Gather the whole state on the CPU, tensor by tensor. A collective.

    Ranks with `keep=False` take part and get placeholders.
    """
    named = named_state_of(optimizer, parameters)
    for name, values in named.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                p = parameters[name]
                by_rows = is_sharded(p) and is_state_of_rows(optimizer, key, value.shape, p.shape)
                whole = _gather(value, p, data_parallel if by_rows else None)
                values[key] = whole.to("cpu", copy=True) if keep else None
    return named


def set_optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], named: NamedState
) -> None:
    """Set the optimizer's state from tensors that are local already.

    Goes through `Optimizer.load_state_dict`, whose hooks users rely on. It casts moments to the
    parameter's dtype, which would round float32 moments of a bfloat16 parameter, so their dtype is
    restored.

    Raises:
        DamagedCheckpointError: a state in fewer bits has a value that no step writes.
    """
    order = [p for group in optimizer.param_groups for p in group["params"]]
    index_of = {id(p): i for i, p in enumerate(order)}
    state = {index_of[id(parameters[name])]: dict(v) for name, v in named.state.items()}
    tensor_settings = _tensor_settings(optimizer)
    groups = [
        {**saved, "params": [index_of[id(p)] for p in group["params"]]}
        for group, saved in zip(optimizer.param_groups, named.param_groups, strict=True)
    ]
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except StateError as error:
        name = next(n for n, p in parameters.items() if p is order[error.number])
        raise DamagedCheckpointError(
            f"the optimizer's state of {name!r} {error.problem}; no save writes that: load another checkpoint."
        ) from error
    for i, key, setting in tensor_settings:
        # Captured graphs and fused optimizers refer to this very tensor.
        setting.fill_(optimizer.param_groups[i][key])
        optimizer.param_groups[i][key] = setting
    for name, values in named.state.items():
        current = optimizer.state[parameters[name]]
        for key, value in values.items():
            if isinstance(value, Tensor) and current[key].dtype != value.dtype:
                current[key] = value.to(current[key].device, copy=True)


def local_part(
    optimizer: Optimizer, key: str, whole: Tensor, p: Tensor, data_parallel: DataParallel | None
) -> Tensor:
    """Return this rank's padded part of a state tensor of `p`, on the device of the moments."""
    if is_sharded(p) and is_state_of_rows(optimizer, key, whole.shape, whole_shape(p)):
        assert data_parallel is not None
        rows = take_rows(whole, own_rows(whole.shape, data_parallel))
        return rows.to(state_device(optimizer, p))
    return whole.clone()


def rekey(loaded: Mapping[str, Any], optimizer: Optimizer, names: Sequence[str]) -> NamedState:
    """Name a state that a plain optimizer saved under positions; a named one is returned as it is.

    Raises:
        ValueError: the number of parameters differs, or no optimizer was saved.
    """
    if not isinstance(loaded, Mapping) or not {"state", "param_groups"} <= loaded.keys():
        raise ValueError(
            f"what is stored for the {type(optimizer).__name__} has no 'state' and 'param_groups'; "
            "check which key the optimizer was saved under."
        )
    groups = [dict(group) for group in loaded["param_groups"]]
    state = {key: dict(value) for key, value in loaded["state"].items()}
    saved = [key for group in groups for key in group["params"]]
    if not all(isinstance(key, int) for key in saved):
        return NamedState(state=state, param_groups=groups)
    if len(saved) != len(names):
        raise ValueError(
            f"the saved {type(optimizer).__name__} has {len(saved)} parameters without names, this "
            f"one has {len(names)}; build the optimizer over the same parameters in the same order."
        )
    name_of = dict(zip(saved, names, strict=True))
    for group in groups:
        group["params"] = [name_of[key] for key in group["params"]]
    return NamedState(
        state={name_of[key]: value for key, value in state.items()}, param_groups=groups
    )


def compare_groups(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], saved: Sequence[Mapping[str, Any]]
) -> list[Problem]:
    """List parameters that are in other groups or missing, such as after a change of the trainable set."""
    current = optimizer.param_groups
    if len(current) != len(saved):
        text = f"{len(saved)} parameter groups in the file, {len(current)} in the optimizer"
        return [Problem(name="param_groups", text=text)]
    name_of = {id(p): name for name, p in parameters.items()}
    problems = []
    for i, (group, saved_group) in enumerate(zip(current, saved, strict=True)):
        here, there = {name_of[id(p)] for p in group["params"]}, set(saved_group["params"])
        where = f"parameter group {i}"
        if (difference := other_states(group, saved_group)) is not None:
            problems.append(Problem(name=where, text=difference))
        problems += [
            Problem(name=n, text=f"in {where} of the optimizer, not of the file")
            for n in sorted(here - there)
        ]
        problems += [
            Problem(name=n, text=f"in {where} of the file, not of the optimizer")
            for n in sorted(there - here)
        ]
    return problems


def compare_state(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    stored: Mapping[tuple[str, str], TensorSpec | None],
) -> list[Problem]:
    """List states of parameters that are missing, or that fit no shard.

    Args:
        optimizer: It loads the file.
        parameters: The optimizer's, by name.
        stored: Tensors in the file by parameter name and the optimizer's own key; None for a plain value.
    """
    found = [
        Problem(name=f"{name} ({key})", text=text)
        for (name, key), spec in stored.items()
        if (text := _state_problem(optimizer, key, parameters.get(name), spec)) is not None
    ]
    if found or not isinstance(optimizer, ByRows):
        return found
    return [
        Problem(name=f"{name} ({key})", text="missing: the optimizer has it, the file does not")
        for name in dict.fromkeys(name for name, _ in stored)
        for key in optimizer.expected_state(parameters[name], whole_shape(parameters[name]))
        if (name, key) not in stored
    ]


def _state_problem(
    optimizer: Optimizer, key: str, p: Tensor | None, spec: TensorSpec | None
) -> str | None:
    if p is None:
        return "in the file, and the optimizer does not train this parameter"
    if isinstance(optimizer, ByRows):
        return _unexpected(optimizer.expected_state(p, whole_shape(p)).get(key), spec)
    if spec is None or not is_sharded(p) or spec.shape == whole_shape(p) or spec.shape.numel() == 1:
        return None
    # Neither the whole parameter's nor a single number: it cannot be divided.
    return f"shape {tuple(spec.shape)} in the file fits no shard"


def _unexpected(
    expected: tuple[torch.Size, torch.dtype] | None, spec: TensorSpec | None
) -> str | None:
    if expected is None:
        return "unexpected: the file has it, the optimizer does not"
    found = None if spec is None else (spec.shape, spec.dtype)
    if found == expected:
        return None
    described = "a plain value" if found is None else f"shape {tuple(found[0])} in {found[1]}"
    return f"{described} in the file, shape {tuple(expected[0])} in {expected[1]} in the optimizer"


def _gather(value: Tensor, p: Tensor, data_parallel: DataParallel | None) -> Tensor:
    if data_parallel is not None:
        return gather_rows(as_rows(value).to(p.device), whole_shape(p), data_parallel)
    return local_rows(value, value)


def _tensor_settings(optimizer: Optimizer) -> list[tuple[int, str, Tensor]]:
    return [
        (i, key, value)
        for i, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, Tensor)
    ]


def _plain(key: str, value: Any) -> Any:
    """Refuse values that a reader could load only by running code; a tensor becomes its number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return (
            [_plain(key, v) for v in value]
            if isinstance(value, list)
            else tuple(_plain(key, v) for v in value)
        )
    if not isinstance(value, _PLAIN):
        raise ValueError(
            f"the optimizer's setting {key!r} is a {type(value).__name__}; a checkpoint holds "
            "numbers, strings, and lists of them. Remove it from the parameter group before saving."
        )
    return value


def _refuse_unshardable(optimizer: Optimizer, name: str, key: str, value: Any, p: Tensor) -> None:
    if not isinstance(value, Tensor):
        _plain(key, value)
    elif (
        is_sharded(p)
        and value.numel() != 1
        and not is_state_of_rows(optimizer, key, value.shape, p.shape)
    ):
        raise ValueError(
            f"the optimizer's {key!r} of {name!r} has shape {tuple(value.shape)}, and the rank's "
            f"shard {tuple(p.shape)}; only state shaped like the shard, or one number, can be "
            "saved in a way that other world sizes can load. Use an optimizer with elementwise "
            "state, or sharding='none'."
        )

"""Full checkpoints: one file that rank 0 writes, with whole tensors under their original names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thunder_memsave.checkpoints.commit import save_synced, write_file
from thunder_memsave.checkpoints.contents import Contents
from thunder_memsave.checkpoints.module_state import (
    Problem,
    compare,
    load_state_dict,
    named_state,
    raise_problems,
    unsharded_state_dict,
)
from thunder_memsave.checkpoints.optimizer_state import (
    NamedState,
    compare_groups,
    compare_state,
    gather_optimizer_state,
    local_part,
    named_parameters_of,
    rekey,
    set_optimizer_state,
)
from thunder_memsave.checkpoints.sources import (
    StateDictSource,
    TensorSpec,
    load_mapped,
    require_tensors,
)
from thunder_memsave.distributed.agreement import is_rank_zero, once, together
from thunder_memsave.distributed.data_parallel import DataParallel

Filter = Mapping[str, Callable[[str, Any], bool]]


def save_full(
    path: Path, contents: Contents, *, data_parallel: DataParallel | None, filter: Filter
) -> None:
    """Gather tensor by tensor to rank 0, which writes the file. A collective."""
    checkpoint: dict[str, Any] = {}
    filters = {key: _Filter(keep) for key, keep in filter.items()}
    for key, module in contents.modules.items():
        checkpoint[key] = unsharded_state_dict(
            module, data_parallel, rank_zero_only=True, keep=filters.get(key)
        )
    for key, optimizer in contents.optimizers.items():
        parameters = named_parameters_of(optimizer, contents.modules.values())
        keep = is_rank_zero(data_parallel)
        named = gather_optimizer_state(optimizer, parameters, data_parallel, keep=keep)
        checkpoint[key] = _filtered(named.as_dict(), filters.get(key))
    for key, value in together(contents.state_of_others, data_parallel).items():
        checkpoint[key] = _filtered(value, filters.get(key))

    def write() -> None:
        for keep in filters.values():
            keep.raise_error()
        write_file(path, lambda file: save_synced(checkpoint, file))

    once(write, data_parallel)


class _Filter:
    """A user's filter, called on rank 0 alone, that keeps its error until all ranks can stop together."""

    def __init__(self, keep: Callable[[str, Any], bool]) -> None:
        self.keep = keep
        self.error: Exception | None = None

    def __call__(self, name: str, value: Any) -> bool:
        try:
            return self.error is None and self.keep(name, value)
        except Exception as error:  # raised by `raise_error`
            self.error = error
            return False

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


def load_full(
    path: Path,
    contents: Contents,
    *,
    data_parallel: DataParallel | None,
    strict: bool,
    weights_only: bool,
) -> dict[str, Any]:
    """Map the file and copy this rank's rows; return the entries that were not asked for."""
    loaded = load_mapped(path, weights_only=weights_only)
    contents.require_keys(loaded, path, strict=strict)
    optimizers = {
        key: _FullOptimizer(optimizer, loaded[key], contents)
        for key, optimizer in contents.optimizers.items()
        if key in loaded
    }
    problems: list[Problem] = []
    for key, module in contents.modules.items():
        if key in loaded:
            source = StateDictSource(require_tensors(loaded[key], path))
            stored = {name: source.spec(name) for name in source.names()}
            problems += compare(named_state(module), stored, strict=strict)
    for full in optimizers.values():
        problems += full.problems()
    raise_problems(problems, what=str(list(contents.everything)))
    for key, module in contents.modules.items():
        if key in loaded:
            load_state_dict(module, loaded.pop(key), strict=strict)
    for key, full in optimizers.items():
        together(partial(full.restore, data_parallel), data_parallel)
        del loaded[key]
    contents.restore_others(loaded)
    return dict(loaded)


class _FullOptimizer:
    """An optimizer and what the file holds for it."""

    def __init__(self, optimizer: Optimizer, saved: Mapping[str, Any], contents: Contents) -> None:
        self.optimizer = optimizer
        self.parameters = named_parameters_of(optimizer, contents.modules.values())
        self.saved = rekey(saved, optimizer, list(self.parameters))

    def problems(self) -> list[Problem]:
        specs = {
            (name, key): TensorSpec(shape=value.shape, dtype=value.dtype)
            if isinstance(value, Tensor)
            else None
            for name, values in self.saved.state.items()
            for key, value in values.items()
        }
        groups = compare_groups(self.optimizer, self.parameters, self.saved.param_groups)
        return [*groups, *compare_state(self.optimizer, self.parameters, specs)]

    def restore(self, data_parallel: DataParallel | None) -> None:
        state = {
            name: {
                key: local_part(self.optimizer, key, value, self.parameters[name], data_parallel)
                if isinstance(value, Tensor)
                else value
                for key, value in values.items()
            }
            for name, values in self.saved.state.items()
        }
        local = NamedState(state=state, param_groups=self.saved.param_groups)
        set_optimizer_state(self.optimizer, self.parameters, local)


def _filtered(value: Any, keep: Callable[[str, Any], bool] | None) -> Any:
    if keep is None or not isinstance(value, MutableMapping):
        return value
    return {k: v for k, v in value.items() if keep(k, v)}

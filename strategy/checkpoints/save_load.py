"""Saves and loads a run's state in either format."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from thunder_memsave.checkpoints.contents import Contents, gathered
from thunder_memsave.checkpoints.full import Filter, load_full, save_full
from thunder_memsave.checkpoints.module_state import load_state_dict
from thunder_memsave.checkpoints.sharded import is_sharded_checkpoint, load_sharded, save_sharded
from thunder_memsave.checkpoints.sources import open_source
from thunder_memsave.distributed.agreement import broadcast, together
from thunder_memsave.distributed.data_parallel import DataParallel


def save_checkpoint(
    path: str | Path,
    state: MutableMapping[str, Any],
    *,
    state_dict_type: Literal["sharded", "full"],
    data_parallel: DataParallel | None,
    filter: Filter | None = None,
) -> None:
    """Save modules, optimizers and everything else in `state`. A collective.

    Nothing is overwritten in place: the old checkpoint stays until the new one is complete.

    Args:
        path: A directory to create for `sharded`, a file for `full` or without a model. Rank 0's is used.
        state: What to save, by key. Objects with a `state_dict` are saved through it. Values of `state_dict()` of
            sharded models and their optimizers are gathered.
        state_dict_type: One file with whole tensors, or a directory with shards.
        data_parallel: The group that holds the shards, or None in a process alone.
        filter: For `full`: by key, a function of `(name, value)` that selects the entries to keep.

    Raises:
        ValueError: `state` has an optimizer without its model, `filter` is used with shards, or `path` is taken by
            something that is not a checkpoint.
    """
    path = Path(broadcast(path, data_parallel))
    contents = Contents.of(gathered(state), asked="save")
    if filter and contents.modules and state_dict_type == "sharded":
        raise ValueError(
            f"filter was given for {list(filter)}, and a sharded checkpoint is saved whole, so "
            "that it can be loaded whole; use state_dict_type='full', or leave the filter out."
        )
    together(lambda: _refuse_taken(path), data_parallel)
    if state_dict_type == "sharded" and contents.modules:
        save_sharded(path, contents, data_parallel=data_parallel)
    else:
        save_full(path, contents, data_parallel=data_parallel, filter=filter or {})


def load_checkpoint(
    path: str | Path,
    state: MutableMapping[str, Any],
    *,
    data_parallel: DataParallel | None,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Restore everything in `state` from either format, saved on any number of ranks.

    Names, shapes and dtypes of all modules and optimizers are checked before any is changed.

    Args:
        path: The path given to `save_checkpoint`. Rank 0's is used.
        state: What to restore, by key; filled in place.
        data_parallel: The group that holds the shards, or None in a process alone.
        strict: Refuse missing and unexpected names, and other dtypes.
        weights_only: Unpickle only tensors and plain values; None means True.

    Returns:
        The entries, other than modules and optimizers, that `state` did not ask for.

    Raises:
        StateMismatchError: the model or optimizer differs; lists how.
        KeyError: a key is not in the checkpoint, and `strict` is set.
        ValueError: there is no checkpoint at `path`, or it is unsafe to read.
    """
    path = Path(broadcast(path, data_parallel))
    contents = Contents.of(state, asked="load")
    weights_only = True if weights_only is None else weights_only
    if together(lambda: _is_sharded(path), data_parallel):
        contents.require_module(asked="load")
        return load_sharded(
            path, contents, data_parallel=data_parallel, strict=strict, weights_only=weights_only
        )

    def load() -> dict[str, Any]:
        return load_full(
            path, contents, data_parallel=data_parallel, strict=strict, weights_only=weights_only
        )

    return together(load, data_parallel)


def load_raw(
    path: str | Path,
    module: nn.Module | Optimizer,
    *,
    data_parallel: DataParallel | None,
    strict: bool = True,
) -> None:
    """Load full weights from a state-dict file, a safetensors file or a model directory.

    Each rank reads its own rows, one tensor after the other. No code in a file is run.

    Raises:
        StateMismatchError: names, shapes or dtypes differ; nothing was changed.
        ValueError: `path` has no full tensors, or `module` is an optimizer.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"a {type(module).__name__} was to be loaded from a raw file; its state has no names "
            "there. Load it with its model: fabric.load(path, {'model': ..., 'optimizer': ...})."
        )
    path = Path(broadcast(path, data_parallel))
    act: Callable[[], None] = lambda: load_state_dict(module, open_source(path), strict=strict)  # noqa: E731
    together(act, data_parallel)


def _is_sharded(path: Path) -> bool:
    if not is_sharded_checkpoint(path) and not path.is_file():
        raise ValueError(
            f"{path} is neither a directory with shards and a meta.pt, nor a file; check the path "
            "(a name that starts with .tmp- is a save that was interrupted)."
        )
    return is_sharded_checkpoint(path)


def _refuse_taken(path: Path) -> None:
    if path.is_dir() and any(path.iterdir()) and not is_sharded_checkpoint(path):
        raise ValueError(
            f"{path} was to become a checkpoint, and is a directory with other files in it; "
            "save under another name."
        )

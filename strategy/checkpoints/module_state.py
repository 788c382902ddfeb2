"""A module's named state, whole or in shards, checked before it is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thunder_memsave.checkpoints.sources import StateDictSource, TensorSource, TensorSpec
from thunder_memsave.distributed.agreement import is_rank_zero
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.fp8.weights.loaded import weight_of_scale, which_half
from thunder_memsave.sharding.rows import gather_full, local_rows, num_real_rows, whole_shape
from thunder_memsave.sharding.sharded_parameter import ShardedParameter

_MOST_LISTED = 20

Keep = Callable[[str, Tensor], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One mismatch between stored and wanted state."""

    name: str
    text: str


class StateMismatchError(ThunderMemsaveError, ValueError):
    """Stored state does not fit the module or optimizer; nothing was changed.

    Args:
        message: Text for the user.
        places: The first mismatches, one line each.
    """

    def __init__(self, message: str, *, places: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.places = tuple(places)

    @classmethod
    def listing(cls, problems: Sequence[Problem], *, what: str, advice: str) -> StateMismatchError:
        """Build the error from what does not fit, with the first problems listed."""
        places = [f"{each.name}: {each.text}" for each in problems[:_MOST_LISTED]]
        if len(problems) > _MOST_LISTED:
            places.append(f"and {len(problems) - _MOST_LISTED} more")
        lines = "".join(f"\n  {place}" for place in places)
        return cls(
            f"{what} in {len(problems)} places; nothing was changed.{lines}\n{advice}",
            places=places,
        )


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters and persistent buffers under all their names, tied twins included.

    Raises:
        ValueError: a submodule saves something other than tensors (`get_extra_state`).
    """
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} is saved by its module as a {type(value).__name__}; only tensors can be "
                "checkpointed. Register it as a buffer, or leave that module out."
            )
    return state


def local_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return this rank's real rows, without padding and without communication."""
    return {name: local_rows(t, t) for name, t in named_state(module).items()}


def unsharded_state_dict(
    module: nn.Module,
    data_parallel: DataParallel | None,
    *,
    rank_zero_only: bool = False,
    names: Callable[[str], bool] | None = None,
    keep: Keep | None = None,
) -> dict[str, Tensor]:
    """Gather full CPU tensors under their original names, tied twins included. A collective.

    They are gathered one by one, so a device holds one full tensor besides its shards.

    Args:
        module: Sharded or not.
        data_parallel: The group that holds the shards.
        rank_zero_only: Other ranks return an empty dict and keep nothing.
        names: Selects the names to gather, for instance an adapter's.
        keep: Selects the full tensors to keep after gathering.
    """
    state: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    holds = not rank_zero_only or is_rank_zero(data_parallel)
    for name, t in named_state(module).items():
        if names is not None and not names(name):
            continue
        if id(t) not in seen:
            # The copy frees the gathered tensor before the next one is gathered.
            whole = gather_full(t, data_parallel)
            seen[id(t)] = whole.to("cpu", copy=True) if holds else whole.new_empty(0)
        if holds and (keep is None or keep(name, seen[id(t)])):
            state[name] = seen[id(t)]
    return state


def load_state_dict(
    module: nn.Module, source: TensorSource | Mapping[str, Tensor], *, strict: bool = True
) -> None:
    """Copy full tensors into the module, each rank its own rows, in place. No communication.

    With `strict=False`, missing and unexpected names are skipped and dtypes converted.

    Raises:
        StateMismatchError: names, shapes or dtypes differ; it lists them, nothing was changed.
    """
    if isinstance(source, Mapping):
        source = StateDictSource(source)
    wanted = named_state(module)
    stored = {name: source.spec(name) for name in source.names()}
    raise_problems(compare(wanted, stored, strict=strict), what=type(module).__name__)
    with torch.no_grad():
        for name, t in first_stored_names(wanted, stored).items():
            copy_rows(source, name, t)


def copy_rows(source: TensorSource, name: str, target: Tensor) -> None:
    """Read this rank's rows of `name` into `target`, leaving its padding as it is."""
    rows = None
    if isinstance(target, ShardedParameter):
        rows = slice(target._first_row, target._first_row + target._num_real_rows)
    if num_real_rows(target):
        local_rows(target, target).copy_(source.read(name, rows))


def first_stored_names(wanted: Mapping[str, Tensor], stored: Iterable[str]) -> dict[str, Tensor]:
    """Return one stored name for each distinct tensor: tied twins may be stored once or twice."""
    available, seen, chosen = set(stored), set(), {}
    for name, t in wanted.items():
        if name in available and id(t) not in seen:
            seen.add(id(t))
            chosen[name] = t
    return chosen


def compare(
    wanted: Mapping[str, Tensor], stored: Mapping[str, TensorSpec], *, strict: bool
) -> list[Problem]:
    """Return the mismatches. Shapes count even if `strict` is off: they cannot be loaded."""
    problems = _name_problems(wanted, stored) if strict else _halves(wanted, stored)
    for name, t in wanted.items():
        if name in stored:
            problems += _tensor_problems(name, t, stored[name], strict=strict)
    return problems


def raise_problems(problems: list[Problem], *, what: str) -> None:
    """Raise all problems as one error, with the first ones listed."""
    if problems:
        raise StateMismatchError.listing(
            problems,
            what=f"the stored state does not fit {what}",
            advice="Build the same model as when it was saved, or pass strict=False to skip missing and unexpected "
            "names and to convert dtypes.",
        )


def _name_problems(wanted: Mapping[str, Tensor], stored: Mapping[str, TensorSpec]) -> list[Problem]:
    covered = {id(t) for name, t in wanted.items() if name in stored}
    missing = [name for name, t in wanted.items() if id(t) not in covered]
    unexpected = [name for name in stored if name not in wanted]
    return [
        *(Problem(name=n, text="missing: the model has it, the file does not") for n in missing),
        *(
            Problem(name=n, text="unexpected: the file has it, the model does not")
            for n in unexpected
        ),
    ]


def _halves(wanted: Mapping[str, Tensor], stored: Mapping[str, TensorSpec]) -> list[Problem]:
    """Find fp8 numbers without their scale and scales without their numbers, between file and model."""
    pairs = [(name, weight_of_scale(name)) for name in wanted]
    return [
        Problem(
            name=weight,
            text=f"the file has {which_half(has_scale=scale in stored)} ({scale}); load both, or neither",
        )
        for scale, weight in pairs
        if weight is not None and (scale in stored) != (weight in stored)
    ]


def _tensor_problems(name: str, t: Tensor, spec: TensorSpec, *, strict: bool) -> list[Problem]:
    shape = whole_shape(t)
    if shape != spec.shape:
        text = f"shape {tuple(spec.shape)} in the file, {tuple(shape)} in the model"
        return [Problem(name=name, text=text)]
    if t.is_meta:
        return [Problem(name=name, text="on the meta device in the model; materialize it first")]
    # Numbers without their scale are no weights, however they are converted.
    if t.dtype != spec.dtype and torch.float8_e4m3fn in (t.dtype, spec.dtype):
        return [Problem(name=name, text=_of_other_numbers(t, spec))]
    if strict and t.dtype != spec.dtype:
        return [Problem(name=name, text=f"dtype {spec.dtype} in the file, {t.dtype} in the model")]
    return []


def _of_other_numbers(t: Tensor, spec: TensorSpec) -> str:
    return (
        f"dtype {spec.dtype} in the file, {t.dtype} in the model, and fp8 numbers are not converted without their "
        "scale: use the same fp8.frozen_weights as when it was saved"
    )

"""Checks before training that all ranks built the same model with the same settings, and finds other values."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import collective
from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.sharding.sharded_parameter import is_sharded

_PACKAGES = (
    "torch",
    "lightning-thunder",
    "lightning",
    "thunder-memsave",
    "transformers",
    "peft",
    "transformer_engine",
)
T = TypeVar("T")
_CHUNK = 1 << 22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankMismatchError(ThunderMemsaveError, ValueError):
    """Two ranks were about to train different models, or one model in different ways."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFacts:
    """Properties of one parameter or buffer that must be equal on all ranks."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    checksum: int | None
    """Checksum of the values; None on the meta device and for shards, which differ between ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """One rank's model and settings, small enough to send to all."""

    settings: Mapping[str, str]
    """Versions and configuration by dotted name."""
    tensors: Mapping[str, TensorFacts]
    """Tensors by kind and name, such as `parameter 'head.weight'`, in the module's order."""


def check_ranks_agree(
    module: nn.Module, *, config: object, data_parallel: DataParallel | None
) -> list[str]:
    """Compare all ranks' digests. One collective, on `data_parallel.everyone`.

    Random seeds are not compared: ranks may draw different dropout masks and data.

    Returns:
        Names of the tensors (of `compared_tensors`) whose values differ between ranks; the same list on every rank.

    Raises:
        RankMismatchError: Two ranks differ otherwise; raised on every rank, naming the first that differs and how.
    """
    if data_parallel is None or data_parallel.num_ranks == 1:
        return []
    own = make_digest(module, config=config)
    first, *others = _of_all_ranks(own, "comparison of the models", data_parallel)
    for rank, other in enumerate(others, start=1):
        found = differences(first, other, rank=rank)
        if found:
            raise RankMismatchError(_message(found, rank))
    return [n for n in first.tensors if any(has_other_values(n, first, o) for o in others)]


def check_choices_agree(
    name: str, choice: str, *, advice: str, data_parallel: DataParallel | None
) -> None:
    """Compare a choice that each rank made by its own machine. One collective, on `data_parallel.everyone`.

    Args:
        name: The setting that was chosen.
        choice: This rank's choice.
        advice: The advice to the user if ranks differ.
        data_parallel: The ranks; None: there is one.

    Raises:
        RankMismatchError: Two ranks differ; raised on every rank, naming the first that differs from rank 0.
    """
    if data_parallel is None or data_parallel.num_ranks == 1:
        return
    first, *others = _of_all_ranks(choice, f"comparison of {name}", data_parallel)
    for rank, other in enumerate(others, start=1):
        if other != first:
            what = f"{name} is {first!r} on rank 0 and {other!r} on rank {rank}"
            raise RankMismatchError(_message([Difference(what=what, advice=advice)], rank))


def _of_all_ranks(own: T, purpose: str, data_parallel: DataParallel) -> list[T]:
    """Gather a value of all ranks, in the order of ranks."""
    values: list[T | None] = [None] * data_parallel.num_ranks
    with collective(purpose, data_parallel.everyone):
        dist.all_gather_object(values, own, group=data_parallel.everyone)
    return [value for value in values if value is not None]


def make_digest(module: nn.Module, *, config: object) -> Digest:
    """Return this rank's digest."""
    caches = _caches(module)
    tensors = {
        name: _facts(t, values=id(t) not in caches) for name, t in compared_tensors(module).items()
    }
    return Digest(settings={**_versions(), **_flatten(config, "config")}, tensors=tensors)


def compared_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by kind and name, such as `parameter 'head.weight'`; tied ones once."""
    parameters = {f"parameter {n!r}": p for n, p in module.named_parameters()}
    return {**parameters, **{f"buffer {n!r}": b for n, b in module.named_buffers()}}


def _caches(module: nn.Module) -> set[int]:
    """Return the ids of the buffers that no checkpoint has."""
    return {
        id(owner._buffers.get(name))
        for owner in module.modules()
        for name in owner._non_persistent_buffers_set
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One fact that two ranks disagree about, and what to do."""

    what: str
    advice: str


def differences(first: Digest, other: Digest, *, rank: int) -> Sequence[Difference]:
    """Return the differences between rank 0 and `rank`: settings, then names, then each tensor's facts.

    Values that differ are not among them: `has_other_values`.
    """
    return [
        *_different_settings(first, other, rank),
        *_different_names(list(first.tensors), list(other.tensors), rank),
        *_different_tensors(first, other, rank),
    ]


def has_other_values(name: str, first: Digest, other: Digest) -> bool:
    """Return whether two ranks, whose models differ in nothing else, have other values for the tensor `name`."""
    return first.tensors[name].checksum != other.tensors[name].checksum


def checksum(t: Tensor) -> int:
    """Return a position-weighted 64-bit sum over the bits of `t`, computed on its device.

    Integer arithmetic modulo 2**64 gives the same number on every device. Takes 100 MB beside `t`,
    whatever its size.
    """
    t = torch.view_as_real(t) if t.is_complex() else t
    flat = t.detach().contiguous().reshape(-1).view(_INTEGERS[t.dtype.itemsize])
    weights = torch.arange(1, min(_CHUNK, flat.numel()) + 1, device=t.device)
    # Odd, so that no difference in a value is multiplied away.
    weights = weights * 0x5851F42D4C957F2D * 2 + 1
    total = flat.numel()
    for part in torch.split(flat, _CHUNK) if total else ():
        partial = (part.to(torch.int64) * weights[: part.numel()]).sum()
        total = (total * 0x14057B7EF767814F + int(partial)) % 2**64
    return total


def _facts(t: Tensor, *, values: bool = True) -> TensorFacts:
    whole = vars(t)["unsharded_shape"] if is_sharded(t) else t.shape
    comparable = values and not t.is_meta and not is_sharded(t)
    return TensorFacts(
        shape=tuple(whole),
        dtype=str(t.dtype).removeprefix("torch."),
        requires_grad=t.requires_grad,
        checksum=checksum(t) if comparable else None,
    )


def _versions() -> dict[str, str]:
    versions = {"version of python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[f"version of {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[f"version of {package}"] = "not installed"
    return versions


def _flatten(value: object, name: str) -> dict[str, str]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if not isinstance(value, Mapping):
        return {name: repr(value)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        flat.update(_flatten(item, f"{name}.{key}"))
    return flat


def _different_settings(first: Digest, other: Digest, rank: int) -> list[Difference]:
    names = dict.fromkeys([*first.settings, *other.settings])
    return [
        Difference(
            what=f"{name} is {first.settings.get(name, 'absent')} on rank 0 and "
            f"{other.settings.get(name, 'absent')} on rank {rank}",
            advice="give every rank the same settings and packages",
        )
        for name in names
        if first.settings.get(name) != other.settings.get(name)
    ]


def _different_names(first: list[str], other: list[str], rank: int) -> list[Difference]:
    advice = "build the same model on every rank"
    only = [(n, 0, rank) for n in first if n not in set(other)]
    only += [(n, rank, 0) for n in other if n not in set(first)]
    found = [
        Difference(what=f"{name} exists on rank {has} and not on rank {lacks}", advice=advice)
        for name, has, lacks in only
    ]
    if not found and first != other:
        i = next(i for i, names in enumerate(zip(first, other, strict=True)) if len({*names}) > 1)
        what = f"number {i} in the model's order is {first[i]} on rank 0 and {other[i]} on"
        found.append(Difference(what=f"{what} rank {rank}", advice=advice))
    return found


def _different_tensors(first: Digest, other: Digest, rank: int) -> list[Difference]:
    shared = [n for n in first.tensors if n in other.tensors]
    found = [_different_fact(n, first.tensors[n], other.tensors[n], rank) for n in shared]
    return [d for d in found if d is not None]


def _different_fact(name: str, a: TensorFacts, b: TensorFacts, rank: int) -> Difference | None:
    on_ranks = f"on rank 0 and {{}} on rank {rank}"
    if a.shape != b.shape:
        what = f"{name} has shape {a.shape} {on_ranks.format(b.shape)}"
        return Difference(what=what, advice="build the same model on every rank")
    if a.dtype != b.dtype:
        what = f"{name} has dtype {a.dtype} {on_ranks.format(b.dtype)}"
        return Difference(what=what, advice="use one precision on every rank")
    if a.requires_grad != b.requires_grad:
        trained = {True: "trainable", False: "frozen"}
        what = f"{name} is {trained[a.requires_grad]} "
        what += on_ranks.format(trained[b.requires_grad])
        return Difference(what=what, advice="freeze the same parameters on every rank")
    if (a.checksum is None) is not (b.checksum is None):
        without = 0 if a.checksum is None else rank
        what = f"{name} has no comparable values (it is on meta, or sharded) on rank {without} only"
        return Difference(what=what, advice="build the model in the same way on every rank")
    return None


def _message(found: Sequence[Difference], rank: int) -> str:
    more = f" ({len(found) - 1} more differences)" if len(found) > 1 else ""
    return (
        f"rank {rank} disagrees with rank 0 before training starts: {found[0].what}{more}; "
        f"{found[0].advice}."
    )

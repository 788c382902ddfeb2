"""Records what PyTorch operators do while Python runs: memory, FLOPs, bytes moved, random numbers and writes in place.

The operators may run on real tensors or on FakeTensors. Only tensors are seen, not the memory that a kernel allocates
inside, which `measure/scratch.py` measures.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from thunder_memsave.aten.attention_flops import ATTENTION, attention_flops

_log = logging.getLogger(__name__)

CUDA_BLOCK_BYTES = 512
"""The caching allocator's `kMinBlockSize`: it rounds every request up to a multiple of it
(torch/csrc/cuda/CUDAConfig, c10/cuda/CUDACachingAllocator.cpp `round_size`), and counts that as allocated."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

_FROM_A_TABLE = {"embedding", "gather", "index", "index_select", "take", "take_along_dim"}
"""Operators that read only as much of their first argument as they return."""

_open: list[AtenRecord] = []


@contextmanager
def once_through_memory(*tensors: Tensor) -> Iterator[None]:
    """Count only these tensors as moved bytes inside: the rest is computed in parts that stay in the cache."""
    before = [(record, record.moved_bytes, record.product_bytes, record.flops) for record in _open]
    try:
        yield
    finally:
        nbytes = sum(map(_nbytes, tensors))
        for record, moved_bytes, product_bytes, flops in before:
            record.moved_bytes = moved_bytes + nbytes
            record.product_bytes = product_bytes + (nbytes if record.flops > flops else 0)


def as_one_kernel(run: Callable[..., Sequence[Tensor]], *args: Tensor) -> Sequence[Tensor]:
    """Return what `run` makes of FakeTensors, and count it as one kernel, which makes its results alone."""
    with _disable_current_modes():
        found = run(*args)
    with once_through_memory(*args, *found):
        return [t.new_empty_strided(t.shape, t.stride()) for t in found]


def turns_of(turns: Sequence[int], tensor: Tensor) -> Iterator[int]:
    """Yield the turns of a loop in which all but the last do the same.

    If tensors have no numbers, as `tensor` tells, and the turns are many, those are the first two and the last: records
    count the second one as often as there are others between.
    """
    if len(turns) <= 3 or not isinstance(tensor, FakeTensor):
        yield from turns
        return
    yield turns[0]
    before = [(record, record.flops, record.moved_bytes, record.product_bytes) for record in _open]
    yield turns[1]
    for record, flops, moved_bytes, product_bytes in before:
        record.flops += (len(turns) - 3) * (record.flops - flops)
        record.moved_bytes += (len(turns) - 3) * (record.moved_bytes - moved_bytes)
        record.product_bytes += (len(turns) - 3) * (record.product_bytes - product_bytes)
    yield turns[-1]


def allocated_bytes(nbytes: int, device_type: str) -> int:
    """Return the bytes that an allocator counts for a request: whole blocks on CUDA, the exact size on the CPU."""
    if device_type != "cuda":
        return nbytes
    return -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


class AtenRecord(TorchDispatchMode):
    """Tracks the storages that operators allocate inside the context."""

    def __init__(
        self,
        existing: Iterable[Tensor] = (),
        *,
        allocated: Callable[[int, str], int] = allocated_bytes,
    ) -> None:
        """Start a record.

        Args:
            existing: Tensors that are live before, which do not count.
            allocated: Maps `(nbytes, device type)` to the bytes that the allocator counts.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._existing = {storage_id(t) for t in existing}
        self._allocated = allocated
        self._live: dict[int, tuple[int, int]] = {}
        self._num_allocations = 0
        self.allocations: list[int] = []
        """Allocations and frees in order, as `planner.graph.Allocations` has it."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops = 0
        """Multiplications and additions, as torch's FlopCounterMode counts, but for attention."""
        self.flops_dtype: torch.dtype | None = None
        """The narrowest floating dtype that the operator with the most of them read."""
        self._most_flops = 0
        self.moved_bytes = 0
        self.product_bytes = 0
        """The part of `moved_bytes` that operators with FLOPs move."""
        self.is_random = False
        self.written: set[int] = set()
        """`storage_id` of existing storages that were written to."""

    def __enter__(self) -> Self:
        _open.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _open.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        for tensor in outputs:
            self._follow(tensor)
        self.is_random |= draws(func, args, kwargs)
        flops = _flops(func, args, kwargs, result)
        self._count_flops(flops, inputs)
        if func._schema.is_mutable:
            self.written |= _written(func, args, kwargs) & self._existing
        elif {storage_id(t) for t in outputs} <= {storage_id(t) for t in inputs}:
            return result  # a view moves nothing
        moved_bytes = _moved_bytes(func, inputs, outputs)
        self.moved_bytes += moved_bytes
        self.product_bytes += moved_bytes if flops else 0
        return result

    def _count_flops(self, flops: int, inputs: Sequence[Tensor]) -> None:
        self.flops += flops
        if flops > self._most_flops:
            read = [t.dtype for t in inputs if t.dtype.is_floating_point]
            self.flops_dtype = min(read, key=lambda dtype: dtype.itemsize, default=None)
            self._most_flops = flops

    def allocations_from(self, start: int) -> tuple[int, ...]:
        """Return `allocations` from an index on, counted anew; frees of earlier ones are left out."""
        num_before = sum(n > 0 for n in self.allocations[:start])
        later = (
            n if n > 0 else n + num_before
            for n in self.allocations[start:]
            if n > 0 or -n > num_before
        )
        return tuple(later)

    def repeat(self, allocations: Sequence[int], more_bytes: int) -> None:
        """Count what was done before once more: its `allocations_from`, and the bytes of its peak above its start."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + more_bytes)
        num_before, sizes = self._num_allocations, [n for n in allocations if n > 0]
        self._num_allocations += len(sizes)
        self.allocations.extend(n if n > 0 else n - num_before for n in allocations)
        self.live_bytes += sum(n if n > 0 else -sizes[-n - 1] for n in allocations)

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._existing:
            return
        nbytes = self._allocated(storage.nbytes(), tensor.device.type)
        if nbytes:
            self._num_allocations += 1
            self.allocations.append(nbytes)
        self._live[key] = nbytes, self._num_allocations
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        nbytes, number = self._live.pop(key)
        self.live_bytes -= nbytes
        if nbytes:
            self.allocations.append(-number)


def storage_id(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_iter(tree) if isinstance(t, Tensor)]


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operator draws random numbers: attention kernels are tagged so, but do so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    probability = _named(func, args, kwargs).get("dropout_p")
    return not (isinstance(probability, float) and probability == 0.0)


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    parameters = func._schema.arguments
    given = {p.name: p.default_value for p in parameters if p.has_default_value()}
    given.update(zip((p.name for p in parameters), args, strict=False))
    return {**given, **kwargs}


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    given = _named(func, args, kwargs)
    parameters = func._schema.arguments
    names = [p.name for p in parameters if p.alias_info is not None and p.alias_info.is_write]
    return {storage_id(t) for name in names for t in _tensors(given.get(name))}


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    packet = func._overloadpacket
    if packet in ATTENTION:
        return attention_flops(packet, _named(func, args, kwargs))
    formula = flop_registry.get(packet)
    try:
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    except Exception as error:  # a formula may know fewer shapes than its operator
        _log.warning("the FLOPs of %s are not counted: %s", packet, error)
        return 0


def _moved_bytes(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    name = func._overloadpacket.__name__
    read, made = list(map(_nbytes, inputs)), sum(map(_nbytes, outputs))
    if "empty" in name:  # allocates memory, and does not write it
        return 0
    if name.startswith("new_") or name.endswith("_like"):  # reads only the shape of its argument
        return made
    if read and name in _FROM_A_TABLE:
        read[0] = min(read[0], made)
    return sum(read) + made


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory: an expanded tensor has less than its shape says."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())

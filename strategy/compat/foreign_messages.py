"""Parses messages of torch, gloo, nccl and other libraries whose facts are only in the text; our errors have fields."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ABOUT_PEERS = re.compile(r"(?i)timed? ?out|connection|socket|broken pipe|gloo/transport|peer")
_AMOUNT = re.compile(r"(?:Tried to allocate|of which) ([\d.]+) (GiB|MiB|KiB|bytes)")
_BYTES_PER_UNIT = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
_NO_MEMORY = re.compile(
    r"CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_ALLOC_FAILED"
    r"|CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'"
)
"""Texts of cuBLAS, cuDNN, the CUDA driver and nccl; cuBLAS says NOT_INITIALIZED where its handle has no room."""
_NUMBERED = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")


def first_line(error: BaseException) -> str:
    """Return the message's first line, without C++ frames; the type's name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def first_sentence(error: BaseException) -> str:
    """Return the message's first sentence, without its full stop; the advice comes after it."""
    return str(error).partition(". ")[0].rstrip(".")


def says_out_of_memory(error: BaseException) -> str | None:
    """Return a sentence about a device out of memory, whoever asked for it; None if the error is about anything else.

    torch's allocator has a type of error for it. Libraries that request memory themselves raise a RuntimeError.
    """
    import torch  # of the commands that use this module, some never need it

    if isinstance(error, torch.OutOfMemoryError):
        return first_sentence(error)
    found = _NO_MEMORY.search(str(error)) if isinstance(error, RuntimeError) else None
    return (
        None if found is None else f"CUDA out of memory outside of PyTorch's allocator ({found[0]})"
    )


def says_peer_failed(error: RuntimeError) -> bool:
    """Return whether gloo, nccl or the store blames another process, rather than this one's arguments."""
    return _ABOUT_PEERS.search(str(error)) is not None


def says_timeout(error: RuntimeError) -> bool:
    """Return whether another process was late, rather than that it ended."""
    return "timed out" in str(error).lower()


def missing_bytes(error: BaseException) -> int | None:
    """Return the bytes that torch requested beyond the free ones; None if its message does not tell.

    `Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.50 MiB is free.`
    """
    found = _AMOUNT.findall(str(error))
    amounts = [float(number) * _BYTES_PER_UNIT[unit] for number, unit in found]
    if not amounts:
        return None
    asked, free = amounts[0], amounts[1] if len(amounts) > 1 else 0.0
    return max(int(asked - free), 1)


def error_numbers(error: BaseException) -> Iterator[int]:
    """Yield the `errno` numbers that Python and Rust write into messages of errors that lost their type."""
    for found in _NUMBERED.finditer(str(error)):
        yield int(found[1] or found[2])


def says_saved_were_freed(error: RuntimeError) -> bool:
    """Return whether autograd's saved tensors were freed."""
    return "second time" in str(error) or "freed" in str(error)


def says_saved_were_overwritten(error: RuntimeError) -> bool:
    """Return whether autograd found a saved tensor changed."""
    return "inplace operation" in str(error)

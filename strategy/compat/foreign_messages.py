"""Reads what torch, gloo, nccl and safetensors tell in the text of an error alone; ours have fields."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ABOUT_PEERS = re.compile(r"(?i)timed? ?out|connection|socket|broken pipe|gloo/transport|peer")
_AMOUNT = re.compile(r"(?:Tried to allocate|of which) ([\d.]+) (GiB|MiB|KiB|bytes)")
_BYTES_PER_UNIT = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
_NUMBERED = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")


def first_line(error: BaseException) -> str:
    """Return what stands before the lines of C++ frames; the type's name of an error that says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def first_sentence(error: BaseException) -> str:
    """Return what stands before the advice, without its full stop."""
    return str(error).partition(". ")[0].rstrip(".")


def says_peer_failed(error: RuntimeError) -> bool:
    """Tell whether gloo, nccl or the store blames another process, rather than this one's arguments."""
    return _ABOUT_PEERS.search(str(error)) is not None


def says_timeout(error: RuntimeError) -> bool:
    """Tell whether another process did not come in time, rather than that it ended."""
    return "timed out" in str(error).lower()


def missing_bytes(error: BaseException) -> int | None:
    """Return what torch asked for beyond what was free; None where its message says nothing of it.

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
    """Tell whether autograd has no saved tensors any more."""
    return "second time" in str(error) or "freed" in str(error)


def says_saved_were_overwritten(error: RuntimeError) -> bool:
    """Tell whether autograd found a saved tensor changed."""
    return "inplace operation" in str(error)

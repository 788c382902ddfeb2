from __future__ import annotations

import pytest
import torch

from thunder_memsave.compat.foreign_messages import (
    error_numbers,
    first_line,
    first_sentence,
    missing_bytes,
    says_out_of_memory,
    says_peer_failed,
    says_timeout,
)

OUT_OF_MEMORY = RuntimeError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 MiB is "
    "free. Of the allocated memory 76.00 GiB is allocated by PyTorch."
)


def test_what_is_missing_is_what_was_asked_for_beyond_what_was_free() -> None:
    assert missing_bytes(OUT_OF_MEMORY) == 3 * 2**29
    short = RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert missing_bytes(short) == 20 * 2**20
    assert missing_bytes(RuntimeError("CUDA error: out of memory")) is None


def test_the_first_line_and_the_first_sentence_are_what_is_told() -> None:
    assert first_line(RuntimeError("\nConnection reset\n#0 frame")) == "Connection reset"
    assert first_line(RuntimeError()) == "RuntimeError"
    assert first_sentence(OUT_OF_MEMORY) == "CUDA out of memory"
    assert first_sentence(RuntimeError("One alone.")) == "One alone"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(str(OUT_OF_MEMORY)), "CUDA out of memory"),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "CUDA out of memory outside of PyTorch's allocator (CUBLAS_STATUS_ALLOC_FAILED)",
        ),
        (
            torch.distributed.DistBackendError(
                "NCCL error in: ProcessGroupNCCL.cpp:42, unhandled cuda error, NCCL version 2.27.5\n"
                "Last error:\nCuda failure 2 'out of memory'"
            ),
            "CUDA out of memory outside of PyTorch's allocator (Cuda failure 2 'out of memory')",
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), None),
        (ValueError("CUDA error: out of memory"), None),
    ],
)
def test_libraries_out_of_memory_are_told_from_other_errors(
    error: Exception, said: str | None
) -> None:
    assert says_out_of_memory(error) == said


@pytest.mark.parametrize(
    ("text", "is_of_peer", "is_timeout"),
    [
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv", True, True),
        ("Connection closed by peer [127.0.0.1]:4711", True, False),
        ("tensors must be of equal size", False, False),
    ],
)
def test_errors_of_other_ranks_are_told_from_those_of_this_one(
    text: str, is_of_peer: bool, is_timeout: bool
) -> None:
    error = RuntimeError(text)
    assert (says_peer_failed(error), says_timeout(error)) == (is_of_peer, is_timeout)


def test_numbers_of_errors_are_read_as_python_and_rust_write_them() -> None:
    text = "[Errno 28] No space left; SafetensorError: Input/output error (os error 5)"
    assert list(error_numbers(RuntimeError(text))) == [28, 5]

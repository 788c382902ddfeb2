"""Host memory of copies: kept, lent to one at a time, and as exact as what was copied."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.fabric import make_fabric
from harness.run_checkpoints import make_state
from thunder_memsave.checkpoints.host_buffers import HostBuffers, padded_bytes
from thunder_memsave.strategy import ThunderMemsaveStrategy

TENSORS = [
    torch.arange(6.0).reshape(2, 3).t(),
    torch.ones((), dtype=torch.bfloat16),
    torch.arange(4).to(torch.float8_e4m3fn),
    torch.empty(0, 3),
    torch.arange(600),
]


def test_copies_have_values_strides_and_storages_of_their_own() -> None:
    loan = HostBuffers().lend(padded_bytes(TENSORS), device_type="cpu")
    copies = [loan.copy(tensor) for tensor in TENSORS]
    for tensor, copied in zip(TENSORS, copies, strict=True):
        assert (copied.dtype, copied.shape, copied.stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        assert torch.equal(copied.float(), tensor.float())
        assert copied.untyped_storage().nbytes() == tensor.nbytes
        assert copied.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert len(pickle.dumps(copies[1])) < 1000


def addresses(loan: Any) -> list[int]:
    return [loan.copy(tensor).data_ptr() for tensor in TENSORS if tensor.numel()]


def test_memory_is_lent_again_only_once_it_was_returned() -> None:
    buffers, num_bytes = HostBuffers(), padded_bytes(TENSORS)
    first = buffers.lend(num_bytes, device_type="cpu")
    held = first.copy(TENSORS[4])
    used = held.data_ptr()
    other = buffers.lend(num_bytes, device_type="cpu")
    assert other.copy(-TENSORS[4]).data_ptr() != used
    assert torch.equal(held, TENSORS[4])
    other.give_back()
    first.give_back()
    assert buffers.kept_bytes == num_bytes
    again = buffers.lend(num_bytes - 512, device_type="cpu")
    assert again.copy(TENSORS[4]).data_ptr() == used
    assert buffers.kept_bytes == 0
    first.give_back()  # once more, which must not lend the memory twice
    assert buffers.kept_bytes == 0


def test_more_than_is_kept_is_new_and_kept_from_then_on() -> None:
    buffers = HostBuffers()
    for num_bytes in (512, 2048, 1024):
        buffers.lend(num_bytes, device_type="cpu").give_back()
    assert buffers.kept_bytes == 2048


def test_snapshots_reuse_their_memory_after_the_write(tmp_path: Path) -> None:
    fabric = make_fabric()
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    state = make_state(fabric, 1.0, step=1)
    num_bytes = strategy.snapshot_bytes(dict(state))
    assert num_bytes > 0

    def weight_address(snapshot: Any) -> int:
        return min(t.data_ptr() for t in snapshot.tensors["model"].values())

    first = strategy.snapshot(dict(state))
    while_first_is_not_written = strategy.snapshot(dict(state))
    assert weight_address(while_first_is_not_written) != weight_address(first)
    first.write(tmp_path / "first", None)
    assert strategy.snapshot_bytes(dict(state)) == 0
    assert weight_address(strategy.snapshot(dict(state))) == weight_address(first)


def test_memory_is_returned_by_a_write_that_fails(tmp_path: Path) -> None:
    fabric = make_fabric()
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    (tmp_path / "file").touch()
    snapshot = strategy.snapshot(dict(make_state(fabric, 1.0, step=1)))
    with pytest.raises(OSError, match="file"):
        snapshot.write(tmp_path / "file" / "below", None)
    assert strategy._host_buffers.kept_bytes > 0


class FakeRuntime:
    """Stands for the CUDA runtime."""

    def __init__(self, error: int) -> None:
        self.error, self.pinned = error, dict[int, int]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.pinned[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_memory_for_a_gpu_is_pinned_as_long_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffers = HostBuffers()
    loan = buffers.lend(1000, device_type="cuda")
    assert list(runtime.pinned.values()) == [1000]
    loan.give_back()
    assert len(runtime.pinned) == 1
    del buffers, loan
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(error=2))
    HostBuffers().lend(1000, device_type="cuda")
    assert "cannot be pinned (CUDA error 2; see `ulimit -l`)" in caplog.text

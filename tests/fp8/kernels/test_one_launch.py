"""A cast in one launch has the bits of PyTorch's arithmetic, and is planned as a kernel without scratch."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_memsave.aten.record import AtenRecord, storage_id
from thunder_memsave.fp8.kernels import one_launch, torch_backend

E4M3 = torch.float8_e4m3fn
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CHECKS = ("fp8, casts in one launch", "fp8, blocks in one launch", "losses in one launch")
ROWS, COLUMNS = 8192, 14336


@pytest.fixture
def _untried() -> Iterator[None]:
    one_launch.why_not.cache_clear()
    yield
    one_launch.why_not.cache_clear()


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton, whose interpreter runs the kernels, is not installed: only PyTorch's wheels for CUDA bring it",
)
def test_under_tritons_interpreter_the_bits_are_those_of_the_cpu(tmp_path: Path) -> None:
    search = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    # A Python of its own: Triton decides when it is imported whether it interprets.
    run = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "gpu", "correct", "--device", "cpu"),
            *("--only", *CHECKS, "--output", str(tmp_path), "--docs", str(tmp_path / "memory.md")),
        ],
        env={**os.environ, "PYTHONPATH": search, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    (path,) = tmp_path.glob("*.json")
    found = {o["name"]: (o["state"], o["reason"]) for o in json.loads(path.read_text())["outcomes"]}
    assert set(found) == set(CHECKS)
    assert {state for state, _ in found.values()} == {"passed"}, (found, run.stderr)


def matrix() -> Tensor:
    """Return a matrix for which PyTorch would launch 252 kernels, on a device that is not here."""
    return torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta")


def test_a_cast_is_planned_without_scratch_and_writes_the_amax() -> None:
    with FakeTensorMode():
        x, scale = matrix(), torch.empty(2, device="meta")
        history = torch.empty(4, 2, device="meta")
        with AtenRecord([x, scale, history]) as record:
            quantized, scale_inv = torch_backend.quantize_delayed(x, scale, history, 1, E4M3, True)
    elements = ROWS * COLUMNS
    assert (quantized.shape, quantized.dtype) == (x.shape, E4M3)
    assert record.peak_bytes == elements + scale_inv.numel() * 4
    assert elements * 3 <= record.moved_bytes < elements * 3 + 100
    assert record.written == {storage_id(history)}


def test_blocks_are_planned_without_scratch() -> None:
    with FakeTensorMode():
        x = matrix()
        with AtenRecord([x]) as record:
            quantized, scale_inv = torch_backend.quantize_block(x, E4M3, 1)
    scales = ROWS * COLUMNS // torch_backend.BLOCK
    assert scale_inv.shape == torch_backend.block_scales_shape(ROWS, COLUMNS, 1)
    assert record.peak_bytes == quantized.numel() + scales * 4
    assert record.moved_bytes == 3 * quantized.numel() + scales * 4


def test_a_transpose_and_an_amax_are_planned_as_before() -> None:
    with FakeTensorMode():
        q = torch.empty(ROWS, COLUMNS, dtype=E4M3, device="meta")
        with AtenRecord([q]) as record:
            assert torch_backend.transpose(q).shape == (COLUMNS, ROWS)
        assert record.moved_bytes == 2 * q.numel()
        x = matrix()
        with AtenRecord([x]) as record:
            assert torch_backend.amax(x).shape == ()
    assert (record.peak_bytes, record.moved_bytes) == (4, 2 * x.numel() + 4)


def test_numbers_on_the_cpu_and_in_float64_stay_with_pytorch() -> None:
    assert not one_launch.applies(torch.empty(1))
    assert one_launch.applies(torch.empty(1, device="meta"))
    assert not one_launch.applies(torch.empty(1, device="meta", dtype=torch.float64))


@pytest.mark.usefixtures("_untried")
def test_a_triton_that_cannot_launch_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ones(*shape: int, device: str) -> Tensor:
        assert device == "cuda"
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch, "ones", ones)
    with caplog.at_level(logging.WARNING):
        assert one_launch.why_not() == "Triton does not run (Failed to find C compiler)"
    assert len(caplog.messages) == 1

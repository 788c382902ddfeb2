"""Checks the surroundings of a step: allocator, nccl, checkpoints, host synchronisation, running out of memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.checks import Check, Target, WrongError, require
from gpu.plans import ENVIRONMENT, rows, tiny_llama
from thunder_memsave.compat.foreign_messages import missing_bytes
from thunder_memsave.distributed import transport
from thunder_memsave.finetune.process.deterministic import unfilled_choice
from thunder_memsave.strategy import ThunderMemsaveStrategy

_MIB = 2**20


def expandable_segments(target: Target) -> str:
    """Free a block between two others, and find a larger one in an expandable segment."""
    first = torch.empty(1024 * _MIB, dtype=torch.uint8, device=target.device)
    second = torch.empty(300 * _MIB, dtype=torch.uint8, device=target.device)
    del first
    third = torch.empty(1200 * _MIB, dtype=torch.uint8, device=target.device)
    segments = torch.cuda.memory_snapshot()
    num_expandable = sum(bool(s.get("is_expandable")) for s in segments)
    reserved = torch.cuda.memory_reserved() // _MIB
    del second, third
    require(num_expandable > 0, f"none of {len(segments)} segments is expandable here")
    return f"{num_expandable} of {len(segments)} segments are expandable, {reserved} MiB reserved"


def collectives(target: Target) -> str:
    """Gather, scatter and reduce in a group of one rank, alone and in buckets, and reuse memory meanwhile."""
    backend = "nccl" if target.is_cuda else "gloo"
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(
            backend,
            init_method=f"file://{directory}/store",
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", 0) if target.is_cuda else None,
        )
        try:
            num = _all_collectives(dist.new_group(), target)
            dist.barrier(device_ids=[0] if target.is_cuda else None)
        finally:
            dist.destroy_process_group()
    return f"{num} results over {backend} have the bits that were sent"


def _all_collectives(group: Any, target: Target) -> int:
    starts: tuple[Callable[..., Any], ...] = (
        transport.start_all_gather,
        transport.start_reduce_scatter,
        transport.start_all_reduce,
    )
    num = 0
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        sent = [torch.randn(n, 8, device=target.device).to(dtype) for n in (1024, 16, 3)]
        for start in starts[:1] if dtype.itemsize == 1 else starts:
            for bucket in (sent[:1], sent):
                handles = start([t.clone() for t in bucket], group)
                for (handle, result), expected in zip(handles, bucket, strict=True):
                    handle.wait()
                    same = torch.equal(result.view(torch.uint8), expected.view(torch.uint8))
                    require(same, f"{start.__name__} of {dtype} changed bits")
                    num += 1
    return num + _reused_memory(group, target)


def _reused_memory(group: Any, target: Target) -> int:
    """Drop a collective's input and write over what was freed before its result is read."""
    size = 2**26 if target.is_cuda else 2**12
    expected = torch.randn(size, device=target.device)
    handle, result = transport.start_reduce_scatter([expected * 1], group)[0]
    others = [torch.full((size,), 7.0, device=target.device) for _ in range(3)]
    handle.wait()
    require(torch.equal(result, expected), "the input was freed before the collective had read it")
    del others
    return 1


class _Training:
    """A tiny model under the strategy, and a step of it."""

    def __init__(self, target: Target) -> None:
        from lightning.fabric import Fabric

        torch.manual_seed(0)
        self.model: Any = tiny_llama(target, torch.float32)
        self.batch = rows(target)
        self.fabric = Fabric(
            accelerator=target.device, devices=1, strategy=ThunderMemsaveStrategy()
        )
        self.fabric.launch()
        self.module: Any = self.fabric.setup(self.model)
        fused = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.optimizer: Any = self.fabric.setup_optimizers(fused)

    def step(self) -> None:
        self.fabric.backward(self.module(**self.batch).loss)
        self.fabric.clip_gradients(
            self.module, self.optimizer, max_norm=1.0, error_if_nonfinite=False
        )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def checkpoint(target: Target) -> str:
    """Save after two steps, take a third, load into another model, take it again, and compare bits."""
    with tempfile.TemporaryDirectory() as directory, unfilled_choice():
        path = Path(directory, "checkpoint")
        training = _Training(target)
        training.step()
        training.step()
        state = {"model": training.module, "optimizer": training.optimizer}
        training.fabric.save(path, state)
        training.step()
        resumed = _Training(target)
        resumed.batch = training.batch
        resumed.fabric.load(path, {"model": resumed.module, "optimizer": resumed.optimizer})
        resumed.step()
    expected, found = training.weights(), resumed.weights()
    differing = [name for name in expected if not torch.equal(expected[name], found[name])]
    require(not differing, f"{len(differing)} of {len(expected)} weights differ after resuming")
    return f"{len(expected)} weights have the same bits after a resumed step"


def no_synchronisation(target: Target) -> str:
    """Let every wait of the host for the device raise, in a step after the first ones."""
    training = _Training(target)
    for _ in range(3):
        training.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step()
    except RuntimeError as error:
        raise WrongError(f"the step waits for the device: {str(error).splitlines()[0]}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "forward, backward, clipping and AdamW wait for nothing"


def out_of_memory(target: Target) -> str:
    """Run out of memory in backward's own thread: the type and the sizes in its message must be known."""
    missing = None
    torch.cuda.set_per_process_memory_fraction(0.02)
    leaf = torch.ones(1, device=target.device, requires_grad=True)
    leaf.register_hook(lambda grad: torch.empty(2**36, device=target.device)[:1])
    try:
        leaf.sum().backward()
    except torch.OutOfMemoryError as error:
        missing = missing_bytes(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    require(missing is not None, "no error came, or its message has no bytes")
    return f"torch.OutOfMemoryError, missing {missing:,} bytes"


_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_RUNS: dict[str, Callable[[Target], str]] = {
    "collectives of one rank": collectives,
    "save, load, resume": checkpoint,
}
_ON_CUDA = {
    "no host synchronisation in a step": no_synchronisation,
    "out of memory in backward": out_of_memory,
}

CHECKS = [
    Check(
        name="expandable segments",
        run=expandable_segments,
        needs_cuda=True,
        environment=_EXPANDABLE,
    ),
    *(
        Check(name=name, run=run, group="system", environment=ENVIRONMENT)
        for name, run in _RUNS.items()
    ),
    *(
        Check(name=name, run=run, needs_cuda=True, group="system", environment=ENVIRONMENT)
        for name, run in _ON_CUDA.items()
    ),
]

"""Five optimizer steps on two ranks are bit-identical whatever the passes do to collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from harness import models
from harness.distributed import run_on_ranks
from harness.joint_passes import JOINT_PASSES, joint_passes
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.rows import shard_module


class Reader(nn.Module):
    """Reads its weight as it is, transposed, in another dtype and in two slices; returns it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 6))
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.linear(x, self.weight, self.bias).float()
        y = y @ self.weight.double().float()
        y = y.tanh().float() @ self.weight.t()
        first, second = self.weight.chunk(2)
        return (x @ first.t()).sum() + (y[:, :3] @ second).sum() + y.sum(), self.weight


def lora() -> nn.Module:
    config: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1}
    return get_peft_model(models.llama(num_layers=2), LoraConfig(**config))


def partly_frozen() -> nn.Module:
    model = models.gpt2(resid_pdrop=0.1)
    for number, p in enumerate(model.parameters()):
        p.requires_grad_(number % 3 > 0)
    return model


def tied() -> nn.Module:
    return models.qwen2(tie_word_embeddings=True)


Build = Callable[[], nn.Module]


def five_steps(
    build: Build,
    named: dict[str, Tensor],
    *,
    mode: str = "zero2",
    prefetch: int | str = 0,
    bucket_bytes: int = 0,
    autocast: bool = False,
    without: str | None = None,
) -> list[Tensor]:
    """Losses, gradients of every step and the final weights, of this rank."""
    torch.manual_seed(0)
    model = build()
    assert dist.group.WORLD is not None
    data_parallel = DataParallel(
        mode=mode,  # type: ignore[arg-type]
        prefetch=prefetch,  # type: ignore[arg-type]
        bucket_bytes=bucket_bytes,
        group=dist.group.WORLD,
    )
    shard_module(model, data_parallel)
    module = CompiledModule(model, data_parallel=data_parallel)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(1)
    results: list[Tensor] = []
    with ExitStack() as stack:
        passes = [name for name in JOINT_PASSES if name != without]
        stack.enter_context(joint_passes(*passes))
        stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocast))
        for _ in range(5):
            loss = module(**named)[0]
            loss.backward()
            results += [loss.detach(), *(p.grad.clone() for p in trained if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
    return results + [p.data.clone() for p in trained]


def assert_bit_identical(ours: list[Tensor], reference: list[Tensor], what: object) -> None:
    assert len(ours) > 10
    for measured, expected in zip(ours, reference, strict=True):
        assert torch.equal(measured, expected), what


def check_all(rank: int) -> None:
    ids = models.token_batch(seed=rank)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    tokens = {"input_ids": ids, "labels": ids}
    variants: list[tuple[Build, dict[str, Tensor], int | str, int]] = [
        (Reader, {"x": x}, 0, 0),
        (Reader, {"x": x}, 10**9, 10**9),
        (lora, tokens, 0, 10**6),
        (partly_frozen, tokens, 20_000, 4_000),
        (tied, tokens, "auto", 10**6),
    ]
    for build, named, prefetch, bucket_bytes in variants:
        window: dict[str, Any] = {"prefetch": prefetch, "bucket_bytes": bucket_bytes}
        ours = five_steps(build, named, mode="zero3", **window)
        assert_bit_identical(ours, five_steps(build, named), (build, window))
    for build, named, _, bucket_bytes in variants[1:3]:
        reference = five_steps(build, named, autocast=True, without="gather_in_compute_dtype")
        window = {"prefetch": 10**9, "bucket_bytes": bucket_bytes}
        ours = five_steps(build, named, mode="zero3", autocast=True, **window)
        assert_bit_identical(ours, reference, (build, "autocast"))


def test_regathering_windows_buckets_and_gathering_in_bfloat16_change_no_bit(
    tmp_path: Path,
) -> None:
    run_on_ranks(check_all, 2, tmp_path / "rendezvous")

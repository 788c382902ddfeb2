"""What the README shows is what runs, and what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from harness.language_model import llama_config
from thunder_memsave import ThunderMemsaveStrategy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks/results"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@dataclass
class Output:
    loss: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Output:
        return Output(self.layers(x).square().mean())


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len(README.splitlines()) <= 120


def test_the_fabric_lines_train_and_print_their_plan(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Model()
    before = [weight.detach().clone() for weight in model.parameters()]

    def batches() -> Iterator[dict[str, Tensor]]:
        for _ in range(3):
            yield {"x": torch.ones(4, 8)}

    code, _ = blocks("python")
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batches": batches(),
    }
    exec(compile(code, "README.md", "exec"), names)
    assert isinstance(names["fabric"].strategy, ThunderMemsaveStrategy)
    assert "decisions: keep" in capsys.readouterr().out
    assert not any(map(torch.equal, before, model.parameters()))


def test_the_fabric_lines_are_few() -> None:
    code, _ = blocks("python")
    assert len(code.splitlines()) <= 12


def test_the_recipe_generates_and_saves_a_model_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(**llama_config(), tie_word_embeddings=False)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ThunderMemsaveStrategy())
    fabric.launch()
    prompt = {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 2).long()}
    names: dict[str, Any] = {
        "torch": torch,
        "fabric": fabric,
        "model": fabric.setup(LlamaForCausalLM(config)),
        "prompt": prompt,
    }
    _, recipe = blocks("python")
    exec(compile(recipe, "README.md", "exec"), names)
    assert names["answer"].shape[1] > 2
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    trained = names["model"].module.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in saved.state_dict().items())


def test_the_plan_that_is_shown_was_printed() -> None:
    (shown,) = blocks("text")
    printed = (RESULTS / "plan_llama3_8b_lora_2026-11-30_cpu.txt").read_text().splitlines()
    assert printed[0].removeprefix("# ") in README
    for line in shown.splitlines():
        assert line in printed


def test_the_saving_that_is_named_was_measured() -> None:
    (low, high) = re.findall(r"ours computes (\d+) to (\d+) % fewer FLOPs", README)[0]
    points = json.loads((RESULTS / "memory_frontier_2026-11-22_cpu.json").read_text())["points"]
    savings = sorted(
        round(100 * saving_at_the_peak_of_checkpointing(each)) for each in points.values()
    )
    assert savings == [int(low), int(high)]


def saving_at_the_peak_of_checkpointing(points: list[dict[str, Any]]) -> float:
    (checkpointed,) = [p for p in points if p["setting"] == "checkpointed"]
    ours = [
        p["flops"]
        for p in points
        if p["method"] == "ours" and p["peak_bytes"] <= checkpointed["peak_bytes"]
    ]
    return 1 - float(min(ours)) / float(checkpointed["flops"])

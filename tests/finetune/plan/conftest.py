"""What tests of plans share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.language_model import llama_config
from thunder_memsave.compiler.compile_call import CallCompiler, Compiled
from thunder_memsave.finetune.plan import run_planner

LENGTH = 64
RUN = {
    "model": {
        "name_or_path": "org/not-here",
        "architecture": {
            **llama_config(),
            "model_type": "llama",
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "max_position_embeddings": LENGTH,
        },
    },
    "lora": {"r": 2, "target_modules": "all-linear"},
    "data": {
        "dataset": {"class_path": "ChatJSONL", "init_args": {"path": "nowhere.jsonl"}},
        "max_seq_length": LENGTH,
    },
    "train": {"global_batch_size": 8, "micro_batch_size": 2},
    "strategy": {"sharding": "zero3"},
    "output_dir": "runs/x",
}


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return str(path)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """All that is compiled during the test."""
    seen: list[Compiled] = []
    compile_call = CallCompiler.compile

    def compile_and_see(self: CallCompiler, *args: Any, **kwargs: Any) -> Compiled:
        seen.append(compile_call(self, *args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(CallCompiler, "compile", compile_and_see)
    monkeypatch.setattr(run_planner, "_SMALLEST_S", 0.01)
    return seen

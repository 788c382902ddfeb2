"""Record what the planner is asked: training graphs of real shapes, for the ablation of its searches.

    PYTHONPATH=tests OMP_NUM_THREADS=1 .venv/bin/python benchmarks/recorded_graphs.py FOLDER [--names NAME ...]

Shipped run files are traced for an H200 that need not be here, on tensors without data, some with fewer layers; small
models of other families are traced on the CPU, with costs by its rates. Each graph becomes one pickle in FOLDER; one
that is there already is left. Pickles are read by nothing but `planner_ablation.py`, on the machine that made them.
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.plan_request import Question
from thunder_memsave.planner.actions import Actions
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import StepMemory, TrainingGraph

_CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments of `solve` but the budget."""

    graph: TrainingGraph
    costs_us: tuple[float, ...]
    memory: StepMemory
    pinned: Actions
    generator_state_bytes: int


class _RecordedError(Exception):
    """Ends a compilation as soon as the question is known."""

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.question = question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--names", nargs="+", choices=list(RECORDERS), default=list(RECORDERS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        path = options.folder / f"{name}.pickle"
        if path.exists():
            continue
        start = time.perf_counter()
        asked = RECORDERS[name]()
        path.write_bytes(pickle.dumps(asked))
        print(
            f"{name}: {len(asked.graph.ops)} operations, {time.perf_counter() - start:.0f} s",
            flush=True,
        )


def of_run_file(name: str, *overrides: str, num_ranks: int) -> Asked:
    """Trace a shipped run file for H200s."""
    from thunder_memsave.finetune.plan.plan_run import plan_run
    from thunder_memsave.finetune.run_file.reading.parse import load_run_config

    rows = [f"--train.global_batch_size={num_ranks}", "--train.micro_batch_size=1"]
    config = load_run_config(_CONFIGS / f"{name}.yaml", [*rows, *overrides])
    plan = partial(plan_run, config, device=device("h200"), num_ranks=num_ranks, has_curve=False)
    return _recorded(plan, device_name="h200")


def of_module(make: Callable[[], tuple[nn.Module, tuple[Any, ...]]]) -> Asked:
    """Trace one training call of a module on this machine."""
    torch.manual_seed(0)
    model, batch = make()
    return _recorded(partial(_fabric().setup(model), *batch), device_name="cpu")


@cache
def _fabric() -> L.Fabric:
    fabric = L.Fabric(
        accelerator="cpu", devices=1, strategy=ThunderMemsaveStrategy(sharding="none")
    )
    fabric.launch()
    return fabric


def _recorded(act: Callable[[], object], *, device_name: str) -> Asked:
    def record(planner: MemoryPlanner, *args: Any) -> Question:
        raise _RecordedError(_question(planner, *args))

    _question = MemoryPlanner._question
    with mock.patch.object(MemoryPlanner, "_question", record):
        try:
            act()
        except _RecordedError as found:
            return _asked(found.question, device_name)
    raise RuntimeError("nothing was planned")


def _asked(question: Question, device_name: str) -> Asked:
    return Asked(
        graph=dataclasses.replace(question.graph, storage_of=dict(question.graph.storage_of)),
        costs_us=tuple(costs_us(question.graph, device(device_name))),
        memory=question.memory,
        pinned=question.pinned,
        generator_state_bytes=question.generator_state_bytes,
    )


def _transformer(kind: str, num_layers: int, **changes: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    from harness import models

    model = getattr(models, kind)(num_layers, **changes)
    return model, (models.token_batch(8, 64),)


class _UNet(nn.Module):
    """Three levels of convolutions, down and up, with skips."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(width << n, width << n + 1, 3, padding=1) for n in range(3)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(3 * width << n, width << n, 3, padding=1) for n in reversed(range(3))
        )
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = F.silu(self.first(x)), []
        for down in self.down:
            skips.append(x)
            x = F.silu(down(F.avg_pool2d(x, 2)))
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = F.silu(up(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1)))
        return self.last(x).pow(2).mean()  # type: ignore[no-any-return]


def _unet() -> tuple[nn.Module, tuple[Any, ...]]:
    return _UNet(), (torch.randn(8, 3, 64, 64),)


def _t5() -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(  # type: ignore[call-arg]
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_heads=4,
        num_layers=4,
        vocab_size=64,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    return _Keyed(model, ("input_ids", "decoder_input_ids")), (torch.randint(0, 64, (8, 64)),) * 2


class _Keyed(nn.Module):
    """Calls a model by keywords, without caches, and gives the logits."""

    def __init__(self, model: nn.Module, keys: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.keys = model, keys

    def forward(self, *values: Any) -> Any:
        return self.model(**dict(zip(self.keys, values, strict=True)), use_cache=False).logits


def _vit() -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    return ViTForImageClassification(config), (torch.randn(64, 3, 32, 32),)


def _deep_stack() -> tuple[nn.Module, tuple[Any, ...]]:
    layers = [layer for _ in range(24) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers), (torch.randn(512, 32),)


def _recurrent() -> tuple[nn.Module, tuple[Any, ...]]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(48, 32), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(x.shape[0], 32)
            for step in x.unbind(1):
                state = torch.tanh(self.cell(torch.cat([step, state], -1)))
            return self.head(state)  # type: ignore[no-any-return]

    return Recurrent(), (torch.randn(256, 20, 16),)


def _clip() -> tuple[nn.Module, tuple[Any, ...]]:
    from harness import models

    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip = models.clip(num_layers=3)

        def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
            return self.clip(input_ids=ids, pixel_values=pixels).logits_per_text  # type: ignore[no-any-return]

    return Clip(), (models.token_batch(32, 16), torch.randn(32, 3, 32, 32))


def _causal(
    config_name: str, model_name: str, **settings: Any
) -> tuple[nn.Module, tuple[Any, ...]]:
    import transformers

    sizes = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = getattr(transformers, config_name)(**sizes, **settings)
    return getattr(transformers, model_name)(config), (torch.randint(3, 101, (8, 64)),)


_ZERO3, _AUTO = "--strategy.sharding=zero3", "--strategy.sharding=auto"
_LONG, _SHORT = "--data.max_seq_length=8192", "--data.max_seq_length=2048"
_LONGEST = "--data.max_seq_length=32768"

_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def _layers(number: int) -> str:
    return f"--model.architecture.num_hidden_layers={number}"


RECORDERS: dict[str, Callable[[], Asked]] = {
    "gpt2": partial(of_module, partial(_transformer, "gpt2", 4)),
    "gpt2_deep": partial(of_module, partial(_transformer, "gpt2", 16)),
    "gpt2_dropout": partial(of_module, partial(_transformer, "gpt2", 6, resid_pdrop=0.1)),
    "bert": partial(of_module, partial(_transformer, "bert", 4)),
    "mixtral": partial(
        of_module, partial(_transformer, "mixtral", 3, experts_implementation="batched_mm")
    ),
    "qwen3_small": partial(of_module, partial(_transformer, "qwen3", 6)),
    "gpt_oss": partial(
        of_module, partial(_transformer, "gpt_oss", 3, experts_implementation="batched_mm")
    ),
    "bloom": partial(of_module, partial(_transformer, "bloom", 5)),
    "falcon": partial(
        of_module,
        partial(_causal, "FalconConfig", "FalconForCausalLM", use_cache=False, **_NO_DROPOUT),
    ),
    "deberta": partial(
        of_module, partial(_causal, "DebertaV2Config", "DebertaV2ForMaskedLM", intermediate_size=48)
    ),
    "clip": partial(of_module, _clip),
    "t5": partial(of_module, _t5),
    "vit": partial(of_module, _vit),
    "unet": partial(of_module, _unet),
    "deep_stack": partial(of_module, _deep_stack),
    "recurrent": partial(of_module, _recurrent),
    "1b_full": partial(of_run_file, "llama3_1b_full", _SHORT, num_ranks=1),
    "1b_lora": partial(of_run_file, "llama3_1b_lora", _SHORT, num_ranks=1),
    "1b_full_long": partial(of_run_file, "llama3_1b_full", _LONGEST, _layers(6), num_ranks=1),
    "qwen3_1_7b_lora": partial(of_run_file, "qwen3_1_7b_lora", _LONG, _layers(10), num_ranks=2),
    "8b_full": partial(of_run_file, "llama3_8b_full", _LONG, _layers(12), num_ranks=8),
    "8b_full_zero3": partial(
        of_run_file, "llama3_8b_full", _LONG, _ZERO3, _layers(8), num_ranks=64
    ),
    "8b_full_auto": partial(of_run_file, "llama3_8b_full", _SHORT, _AUTO, _layers(6), num_ranks=8),
    "8b_lora": partial(of_run_file, "llama3_8b_lora", _LONG, num_ranks=1),
    "8b_lora_zero3": partial(
        of_run_file, "llama3_8b_lora", _LONG, _ZERO3, _layers(8), num_ranks=64
    ),
    "8b_lora_auto": partial(of_run_file, "llama3_8b_lora", _SHORT, _AUTO, _layers(4), num_ranks=8),
    "8b_lora_fp8": partial(of_run_file, "llama3_8b_lora_fp8", _LONG, _layers(6), num_ranks=1),
    "8b_lora_fp8_zero3": partial(
        of_run_file, "llama3_8b_lora_fp8", _SHORT, _ZERO3, _layers(6), num_ranks=8
    ),
    "qwen3_8b_full": partial(of_run_file, "qwen3_8b_full", _LONG, _ZERO3, _layers(8), num_ranks=16),
    "qwen3_32b_lora": partial(
        of_run_file, "qwen3_32b_lora", _LONG, _ZERO3, _layers(6), num_ranks=64
    ),
    "70b_lora": partial(of_run_file, "llama3_70b_lora", _LONG, _ZERO3, _layers(10), num_ranks=64),
    "70b_full": partial(of_run_file, "llama3_70b_full", _LONG, _ZERO3, _layers(12), num_ranks=64),
    "70b_full_auto": partial(
        of_run_file, "llama3_70b_full", _SHORT, _AUTO, _layers(4), num_ranks=64
    ),
    "70b_full_80_layers": partial(of_run_file, "llama3_70b_full", _LONG, num_ranks=64),
}


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()

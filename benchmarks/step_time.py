"""Steady time of a training step (forward and backward) of ours against eager's, one after the other on one CPU thread.

    python benchmarks/step_time.py [--only resnet18 'llama 32'] [--repeats 31] [--fused] [--save]

A machine that others use slows both alike: steps alternate (ours, eager, ours, ...), and medians of the CPU time of the
process are compared, which does not count while others run.
`--save` writes the table into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import copy
import platform
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from convolutional import CLASSES, mobilenet_v3, resnet18
from lightning.fabric import Fabric
from torch import Tensor, nn

from thunder_memsave.strategy import ThunderMemsaveStrategy

RESULTS = Path(__file__).parent / "results"
WARM_STEPS = 3
VOCABULARY = 96

Step = Callable[[], None]
Made = tuple[nn.Module, dict[str, Any]]


class Classified(nn.Module):
    """A classifier of images, with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


class Bilinear(nn.Module):
    """A bilinear form of two batches, by the module or by the function."""

    def __init__(self, *, by_function: bool) -> None:
        super().__init__()
        self.by_function = by_function
        self.form = nn.Bilinear(64, 64, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.by_function:
            return F.bilinear(x, y, self.form.weight).square().mean()
        z: Tensor = self.form(x, y)
        return z.square().mean()


def main() -> None:
    """Measure, print the table, and write it if asked to."""
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    names = [n for n in MODELS if not arguments.only or n in arguments.only]
    lines = [_head()]
    print(lines[0])
    for name in names:
        for fusion in [False, True] if arguments.fused else [False]:
            seconds = _measured(*MODELS[name](), repeats=arguments.repeats, fusion=fusion)
            lines.append(_row(f"{name}, fused" if fusion else name, *seconds))
            print(lines[-1], flush=True)
    if arguments.save:
        _save(lines, arguments.repeats)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--fused", action="store_true", help="each also with strategy.fusion")
    parser.add_argument("--save", action="store_true")
    return parser


def _measured(
    model: nn.Module, batch: dict[str, Any], *, repeats: int, fusion: bool
) -> tuple[list[float], ...]:
    """Return the seconds of each step of ours, and of eager's."""
    strategy = ThunderMemsaveStrategy(fusion=fusion)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    of_eager = _step(copy.deepcopy(model), batch)
    of_ours = _step(fabric.setup(model), batch)
    steps: tuple[Step, Step] = (of_ours, of_eager)
    for step in steps * WARM_STEPS:
        step()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for step, found in zip(steps, seconds, strict=True):
            start = time.process_time()
            step()
            found.append(time.process_time() - start)
    return seconds


def _step(model: nn.Module, batch: Mapping[str, Any]) -> Step:
    parameters = list(model.parameters())

    def step() -> None:
        output = model(**batch)
        (output if isinstance(output, Tensor) else output.loss).backward()
        for p in parameters:
            p.grad = None

    return step


def _head() -> str:
    columns = "| model | ours, ms | eager, ms | ours / eager | middle half of the ratios |"
    return f"{columns}\n|---|---:|---:|---:|---:|"


def _row(name: str, ours: list[float], eager: list[float]) -> str:
    low, _, high = quantiles([a / b for a, b in zip(ours, eager, strict=True)], n=4)
    a, b = median(ours), median(eager)
    return f"| {name} | {1e3 * a:.2f} | {1e3 * b:.2f} | {a / b:.2f} | {low:.2f} to {high:.2f} |"


def _save(lines: list[str], repeats: int) -> None:
    versions = ", ".join(
        f"{n} {version(n)}" for n in ("torch", "lightning-thunder", "transformers")
    )
    text = (
        "# Steady steps of ours against eager's\n\n"
        f"`python benchmarks/step_time.py --save`, {date.today()}, one thread of a {platform.machine()} CPU that other "
        f"processes used too, Python {platform.python_version()}, {versions}; float32, dropout 0. Forward and "
        f"backward, medians of the CPU time of {repeats} steps each, in turn. `32`: hidden size 32, 2 layers, 2 x 16 "
        "tokens; `256`: 256, 4, 2 x 128.\n\n"
    )
    (RESULTS / f"step_time_{date.today()}_cpu.md").write_text(text + "\n".join(lines) + "\n")


def _images(model: Callable[[], nn.Module]) -> Callable[[], Made]:
    def make() -> Made:
        torch.manual_seed(0)
        labels = torch.randint(0, CLASSES, (8,))
        return Classified(model()), {"images": torch.randn(8, 3, 64, 64), "labels": labels}

    return make


def _bilinear(*, by_function: bool) -> Callable[[], Made]:
    def make() -> Made:
        torch.manual_seed(0)
        return Bilinear(by_function=by_function), {
            "x": torch.randn(32, 64),
            "y": torch.randn(32, 64),
        }

    return make


def _transformer(name: str, hidden: int) -> Callable[[], Made]:
    layers, length = (2, 16) if hidden == 32 else (4, 128)

    def make() -> Made:
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        sizes = _sizes(hidden, layers)
        known = {**vars(kind.config_class()), "decoder_start_token_id": 0}
        config = kind.config_class(**{k: v for k, v in sizes.items() if _is_known(k, known)})
        config._attn_implementation = "sdpa" if name != "T5ForConditionalGeneration" else "eager"
        ids = torch.randint(2, VOCABULARY, (2, length))
        return kind(config).train(), {"input_ids": ids, "labels": ids}

    return make


def _is_known(name: str, known: Mapping[str, Any]) -> bool:
    return name in known


def _sizes(hidden: int, layers: int) -> dict[str, Any]:
    """Return sizes by all names that the configurations have for them."""
    return {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model"), hidden),
        **dict.fromkeys(("intermediate_size", "n_inner", "d_ff"), 4 * hidden),
        **dict.fromkeys(
            ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), layers
        ),
        **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_key_value_heads"), 4),
        **dict.fromkeys(("d_kv", "head_dim"), hidden // 4),
        **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
        **dict.fromkeys(("vocab_size",), VOCABULARY),
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout_rate"), 0.0),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        **dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id"), 0),
        "eos_token_id": 1,
        "use_cache": False,
    }


_TRANSFORMERS = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen2": "Qwen2ForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
}
MODELS: dict[str, Callable[[], Made]] = {
    "resnet18": _images(resnet18),
    "mobilenet_v3": _images(mobilenet_v3),
    "nn.Bilinear": _bilinear(by_function=False),
    "F.bilinear": _bilinear(by_function=True),
    **{f"{n} {h}": _transformer(kind, h) for h in (32, 256) for n, kind in _TRANSFORMERS.items()},
}

if __name__ == "__main__":
    main()

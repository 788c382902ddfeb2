"""Time of the first training step of a Llama-shaped transformers model: ours, thunder.jit, torch.compile, eager.

    python benchmarks/first_step.py [--repeats 3] [--layers 6 24] [--output benchmarks/results/first_step.json]

Every measurement is a process of its own with empty compiler caches; the median is reported. The time is
from the first call of the compiled model to the end of `backward`, imports and model construction excluded.
Goal: at 6 layers at least 4x faster than thunder.jit and 3x faster than a cold torch.compile; from 6 to 24 layers no
more than linear growth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

VARIANTS = ("ours", "thunder.jit", "torch.compile", "eager")
STUB_NOTE = (
    "thunder.jit cannot interpret transformers' output-capture context "
    "(transformers.utils.output_capturing._active_collector); it is stubbed for that variant only."
)


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.measure is not None:
        print(json.dumps(_measure(arguments.measure, arguments.layers[0])))
        return
    small, large = arguments.layers
    print(STUB_NOTE)
    seconds = {
        f"{variant} {small} layers": _median(variant, small, arguments.repeats)
        for variant in VARIANTS
    }
    seconds[f"ours {large} layers"] = _median("ours", large, arguments.repeats)
    ours = seconds[f"ours {small} layers"]
    ratios = {
        "thunder.jit / ours": seconds[f"thunder.jit {small} layers"] / ours,
        "torch.compile / ours": seconds[f"torch.compile {small} layers"] / ours,
        f"ours {large} layers / ours {small} layers": seconds[f"ours {large} layers"] / ours,
        "layers ratio": large / small,
    }
    _report(seconds, ratios, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser


def _median(variant: str, layers: int, repeats: int) -> float:
    seconds = []
    for number in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--measure", variant, "--layers", str(layers)]
            environment = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": cache,
                "PYTHONWARNINGS": "ignore",
            }
            run = subprocess.run(
                command, env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
        seconds.append(json.loads(run.stdout.splitlines()[-1])["seconds"])
        print(f"{variant:14} {layers:3} layers, run {number + 1}: {seconds[-1]:6.2f} s", flush=True)
    return float(median(seconds))


def _measure(variant: str, layers: int) -> dict[str, float]:
    import torch

    torch.manual_seed(0)
    model = _model(layers)
    run = _compile(variant, model)
    ids = torch.randint(0, 512, (4, 128))
    start = time.perf_counter()
    output = run(input_ids=ids, labels=ids, use_cache=False)
    loss = output["loss"] if isinstance(output, dict) else output.loss
    loss.backward()
    seconds = time.perf_counter() - start
    assert all(p.grad is not None for p in model.parameters())
    return {"seconds": seconds}


def _model(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    ).train()


def _compile(variant: str, model: Any) -> Any:
    import torch

    if variant == "ours":
        from thunder_memsave.compiler.compiled_module import CompiledModule

        return CompiledModule(model)
    if variant == "thunder.jit":
        from thunder_memsave import compat

        compat.apply()
        import thunder
        from transformers.utils import output_capturing

        output_capturing._active_collector = _NoCollector()  # type: ignore[assignment]
        return thunder.jit(model)
    return torch.compile(model) if variant == "torch.compile" else model


class _NoCollector:
    """Stands in for transformers' context variable, and collects nothing."""

    def set(self, value: object) -> None:
        """Collect nothing."""

    def get(self) -> None:
        """Return None: nothing was collected."""

    def reset(self, token: object) -> None:
        """Do nothing."""


def _report(
    seconds: dict[str, float], ratios: dict[str, float], arguments: argparse.Namespace
) -> None:
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            name: version(name)
            for name in ("torch", "lightning-thunder", "transformers", "thunder-memsave")
        },
        "repeats": arguments.repeats,
        "note": STUB_NOTE,
        "median_seconds": {k: round(v, 3) for k, v in seconds.items()},
        "ratios": {k: round(v, 2) for k, v in ratios.items()},
    }
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

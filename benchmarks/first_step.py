"""Time of the first training step of a Llama-shaped transformers model: ours, thunder.jit, torch.compile, eager.

    python benchmarks/first_step.py [--repeats 3] [--layers 6 24] [--only NAMES] [--output F.json]

Every measurement is a process of its own. Each round has one of every variant, one after the other; the median is
reported. Compiler caches are empty, but for "torch.compile, second start", which has those of an earlier process. The
time is from the first call of the compiled model to the end of `backward`, imports and model construction excluded.
Goals: the second start at most 1.0 of torch.compile's, a cold one at most half of it, and from 6 to 24 layers at most
1.6 times the seconds.
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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

COMPILED = "torch.compile"
AGAIN = "torch.compile, second start"
VARIANTS = ("ours", AGAIN, COMPILED, "thunder.jit", "eager")
STUB_NOTE = (
    "thunder.jit cannot interpret transformers' output-capture context "
    "(transformers.utils.output_capturing._active_collector); it is stubbed for that variant only."
)


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.measure is not None:
        print(json.dumps(_measure(arguments.measure, arguments.layers[0])))
        return
    print(STUB_NOTE)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as kept:
        if AGAIN in arguments.only:
            for layers in arguments.layers:
                _seconds(AGAIN, layers, kept)  # fills the caches
        for _ in range(arguments.repeats):
            for layers in arguments.layers:
                for variant in arguments.only:
                    name = f"{variant}, {layers} layers"
                    seconds.setdefault(name, []).append(_seconds(variant, layers, kept))
                    print(f"{name:40} {seconds[name][-1]:6.2f} s", flush=True)
    medians = {name: median(each) for name, each in seconds.items()}
    _report(medians, _ratios(medians, arguments), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--only", choices=VARIANTS, nargs="+", default=VARIANTS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser


def _ratios(medians: dict[str, float], arguments: argparse.Namespace) -> dict[str, float]:
    """Return our time over each other variant's, and from one number of layers to the next."""
    found = {}
    for layers in arguments.layers:
        for variant in arguments.only:
            if variant != "ours" and "ours" in arguments.only:
                ours = medians[f"ours, {layers} layers"]
                found[f"ours / {variant}, {layers} layers"] = (
                    ours / medians[f"{variant}, {layers} layers"]
                )
    for few, many in pairwise(arguments.layers):
        for variant in arguments.only:
            found[f"{variant}, {many} / {few} layers"] = (
                medians[f"{variant}, {many} layers"] / medians[f"{variant}, {few} layers"]
            )
    return found


def _seconds(variant: str, layers: int, kept: str) -> float:
    """Return the seconds that a process of its own takes; only a second start has the caches in `kept`."""
    with tempfile.TemporaryDirectory() as empty:
        run = subprocess.run(
            [sys.executable, __file__, "--measure", variant, "--layers", str(layers)],
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": kept if variant == AGAIN else empty,
                "PYTHONWARNINGS": "ignore",
            },
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return float(json.loads(run.stdout.splitlines()[-1])["seconds"])


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
    return torch.compile(model) if variant in (COMPILED, AGAIN) else model


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

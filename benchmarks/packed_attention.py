"""Time of a training step on the CPU of packed rows, whose documents are kept apart by boundaries or by a mask.

    python benchmarks/packed_attention.py [--repeats 5] [--output benchmarks/results/packed_attention.json]

One row of 4096 tokens has 8 documents of 512. The steps are interleaved, and the median of each kind is reported. Goal:
with boundaries, a step takes at most two thirds of the time with the mask. On a machine that others use too, look at
the processor's seconds, those of all threads; with as many threads as cores, each operation there waits for a thread
that does not run, so OMP_NUM_THREADS=1 measures the work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.finetune.model.documents_apart import take_boundaries
from thunder_memsave.ops.families.packed_attention import boundaries_of, packed_mask

LENGTH, DOCUMENT = 4096, 512


def main() -> None:
    arguments = _parser().parse_args()
    torch.manual_seed(0)
    model = _model(arguments.hidden_size)
    boundaries = boundaries_of(_ends(), LENGTH)
    masks = {"boundaries": boundaries, "mask": packed_mask(boundaries, 1, LENGTH)}
    steps = {name: CompiledModule(model) for name in masks}
    for name, compiled in steps.items():  # compiles
        _step(compiled, masks[name])
    seconds: dict[str, list[float]] = {name: [] for name in masks}
    of_processor: dict[str, list[float]] = {name: [] for name in masks}
    for _ in range(arguments.repeats):
        for name, compiled in steps.items():
            start, started = time.perf_counter(), time.process_time()
            _step(compiled, masks[name])
            seconds[name].append(time.perf_counter() - start)
            of_processor[name].append(time.process_time() - started)
            print(f"{name:10} {seconds[name][-1]:6.2f} s", flush=True)
    flops = {name: _flops(compiled, masks[name]) for name, compiled in steps.items()}
    _report(_medians(seconds), _medians(of_processor), flops, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--output", type=Path)
    return parser


def _model(hidden_size: int) -> Any:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 128),
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    take_boundaries(model)
    return model


def _ends() -> torch.Tensor:
    return torch.arange(DOCUMENT, LENGTH + 1, DOCUMENT, dtype=torch.int32)[None]


def _step(compiled: CompiledModule, mask: torch.Tensor) -> None:
    ids = torch.arange(LENGTH)[None] % 512
    positions = torch.arange(LENGTH)[None] % DOCUMENT
    output = compiled(
        input_ids=ids, attention_mask=mask, position_ids=positions, labels=ids, use_cache=False
    )
    output.loss.backward()
    compiled.zero_grad()


def _flops(compiled: CompiledModule, mask: torch.Tensor) -> int:
    with AtenRecord() as record:
        _step(compiled, mask)  # guards see the mode: this compiles again, which counts too
        of_first = record.flops
        _step(compiled, mask)
    return record.flops - of_first


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: median(each) for name, each in seconds.items()}


def _report(
    seconds: dict[str, float],
    of_processor: dict[str, float],
    flops: dict[str, int],
    arguments: argparse.Namespace,
) -> None:
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers", "thunder-memsave")},
        "threads": torch.get_num_threads(),
        "row": f"{LENGTH} tokens, documents of {DOCUMENT}; hidden size {arguments.hidden_size}",
        "repeats": arguments.repeats,
        "median_seconds": {k: round(v, 3) for k, v in seconds.items()},
        "median_processor_seconds": {k: round(v, 3) for k, v in of_processor.items()},
        "gflops_of_a_step": {k: round(v / 1e9, 1) for k, v in flops.items()},
        "mask / boundaries": round(seconds["mask"] / seconds["boundaries"], 2),
    }
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

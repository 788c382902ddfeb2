"""Compares LoRA with full training: FLOPs, bytes saved for backward, CPU seconds; eager, Thunder, ours, ours in fp8.

    PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/frozen_weights.py [--no-times] [--output FILE]

The model is a small GPT, the adapters are PEFT's, on all linears of its blocks. Every method is a process of its own.
FLOPs are counted while a step runs (`memory_frontier.py`). Saved bytes are those of tensors that forward hands to
autograd, each storage once, without those live before the step: parameters, buffers, frozen weights in fp8. Casts
to fp8 and transpositions of fp8 tensors are counted by their calls. `ours, TE` runs TransformerEngine's own Python with
kernels that are emulated on the CPU: its counts are meaningful, its seconds are not, and are not measured.

Inputs of linears are cheap to recompute from the activations that norms, activation functions and attention keep, so
without a budget ours keeps nothing for weights, trained or not, and LoRA saves no less than full training: it leaves
out gradients and optimizer state. The activations between an adapter's two weights come on top, to the byte, less the
first input, before which nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from memory_frontier import Claim, _flops, _model, _planner

METHODS = ("eager", "thunder", "ours")
FP8_WAYS = {
    "fp8 torch": ("torch", "delayed"),
    "fp8 TE": ("transformer_engine", "delayed"),
    "fp8 torch, block": ("torch", "block"),
}
"""Backend and recipe of each way to run in fp8."""
WAYS = (
    *((method, dtype) for dtype in ("float32", "bfloat16") for method in METHODS),
    *(("ours", way) for way in FP8_WAYS),
)
TRAINED = ("full", "lora")
NUM_STEPS = 10

RANK = 16
WIDTH, BLOCKS, ROWS, CLASSES = 128, 6, 4 * 256, 256
LINEARS = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
"""In and out features of a block's linears."""

_SCORES = BLOCKS * 2 * ROWS * 256 * WIDTH
"""FLOPs with which attention kernels recompute the scores in backward; Thunder decomposes attention into products."""

NOT_RUN = {
    "thunder, fp8": "Thunder's executor of TransformerEngine needs a GPU",
    "eager, fp8": "te.Linear needs a GPU",
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """The counts of a step of one way to train."""

    method: str
    dtype: str
    trained: str
    flops: int
    saved_bytes: int
    num_casts: int
    """Casts to fp8."""
    num_transposes: int
    """Transpositions of fp8 tensors."""
    cpu_seconds: float | None
    """CPU seconds of one thread."""


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.measure is not None:
        _measure(*arguments.measure, has_times=not arguments.no_times)
        return
    points = [
        _in_a_process(*way, trained, no_times=arguments.no_times)
        for way in WAYS
        for trained in TRAINED
    ]
    claims = list(_claims(points))
    for claim in claims:
        print(f"{'holds' if claim.holds else 'FAILS'}: {claim.text}")
    if arguments.output is not None:
        _write(points, claims, arguments.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-times", action="store_true", help="counts alone")
    parser.add_argument("--output", type=Path, help="path of the JSON")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    return parser


def _in_a_process(method: str, dtype: str, trained: str, *, no_times: bool) -> Point:
    command = [sys.executable, __file__, "--measure", method, dtype, trained]
    command += ["--no-times"] if no_times else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    point = Point(**json.loads(run.stdout.splitlines()[-1]))
    seconds = "" if point.cpu_seconds is None else f"{point.cpu_seconds:8.3f} s"
    print(
        f"{method:8} {dtype:16} {trained:5} {point.flops / 1e9:8.3f} GFLOP "
        f"{point.saved_bytes / 2**20:8.3f} MiB saved {point.num_casts:4} casts "
        f"{point.num_transposes:4} transposes {seconds}",
        flush=True,
    )
    return point


def _measure(method: str, dtype: str, trained: str, *, has_times: bool) -> None:
    """Measure one point in this process, and print it as JSON in the last line."""
    import torch

    from thunder_memsave import compat

    compat.apply()  # before the harness imports thunder
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    is_emulated = dtype == "fp8 TE"
    with _emulated_te() if is_emulated else nullcontext():
        point = _point(method, dtype, trained, has_times=has_times and not is_emulated)
    print(json.dumps(asdict(point)))


@contextmanager
def _emulated_te() -> Iterator[None]:
    from harness.te_on_cpu import transformer_engine
    from thunder_memsave.fp8.kernels import te_backend

    with transformer_engine(), patch.object(te_backend, "DEVICE_TYPES", frozenset({"cpu"})):
        yield


def _point(method: str, dtype: str, trained: str, *, has_times: bool) -> Point:
    import torch

    model, batch = _model("gpt")
    if trained == "lora":
        _add_lora(model)
    model.to(torch.float32 if dtype == "float32" else torch.bfloat16)
    module = _compiled(method, dtype, model)

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        module(**batch).backward()

    for _ in range(2):
        step()
    saved_bytes = _saved_bytes(model, module, step)
    with _counted_calls() as calls:
        step()
    return Point(
        method=method,
        dtype=dtype,
        trained=trained,
        flops=_flops(module, step),
        saved_bytes=saved_bytes,
        num_casts=calls["quantize"],
        num_transposes=calls["transpose"],
        cpu_seconds=_cpu_seconds(step) if has_times else None,
    )


def _cpu_seconds(step: Callable[[], None]) -> float:
    """Return the CPU seconds of the fastest of several steps: other work on the machine only adds."""
    seconds = []
    for _ in range(NUM_STEPS):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return min(seconds)


def _add_lora(model: Any) -> None:
    import peft

    config = peft.LoraConfig(r=RANK, target_modules=["qkv", "out", "up", "down"])
    peft.inject_adapter_in_model(config, model)


def _compiled(method: str, dtype: str, model: Any) -> Any:
    if method == "eager":
        return model
    if method == "thunder":
        import thunder

        return thunder.jit(model)
    from thunder_memsave.compiler.compiled_module import CompiledModule

    return CompiledModule(model, planner=_planner(None), fp8=_fp8_linears(dtype, model))


def _fp8_linears(dtype: str, model: Any) -> Any:
    """Return all linears in fp8, except the head and the adapters."""
    from thunder_memsave.config import Fp8Config
    from thunder_memsave.fp8.compute.linears import Fp8Linears
    from thunder_memsave.fp8.recipe import recipe_of
    from thunder_memsave.fp8.weights.layers import choose

    if not dtype.startswith("fp8 "):
        return None
    is_adapted = any("lora_" in name for name, _ in model.named_modules())
    skipped = ("head", "lora_A", "lora_B") if is_adapted else ("head",)
    backend: Any
    recipe: Any
    backend, recipe = FP8_WAYS[dtype]
    choices = choose(model, skip_modules=skipped)
    return Fp8Linears(model, choices, recipe=recipe_of(Fp8Config(recipe=recipe)), backend=backend)


def _saved_bytes(model: Any, module: Any, step: Callable[[], None]) -> int:
    import torch
    from torch import Tensor

    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    held = [*model.parameters(), *model.buffers(), *_frozen_in_fp8(module)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    before = {tensor.untyped_storage().data_ptr() for tensor in held}
    return sum(nbytes for pointer, nbytes in found.items() if pointer not in before)


def _frozen_in_fp8(module: Any) -> Iterator[Any]:
    linears = getattr(module, "fp8", None)
    for linear in () if linears is None else linears.by_name.values():
        for part in linear.parts(training=True, transposed=True):
            yield linear.read(part)


@contextmanager
def _counted_calls() -> Iterator[dict[str, int]]:
    """Count the calls of each kind of operation of the fp8 backends."""
    from thunder_memsave.fp8.kernels import te_backend, torch_backend

    calls = {"quantize": 0, "transpose": 0}

    def count(kind: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls[kind] += 1
        return function(*args, **kwargs)

    patches = [
        patch.object(backend, name, partial(count, name.partition("_")[0], getattr(backend, name)))
        for backend in (torch_backend, te_backend)
        for name in ("quantize_delayed", "quantize_current", "quantize_block", "transpose")
    ]
    for each in patches:
        each.start()
    try:
        yield calls
    finally:
        for each in patches:
            each.stop()


def _claims(points: Sequence[Point]) -> Iterator[Claim]:
    at = {(p.method, p.dtype, p.trained): p for p in points}
    for method, dtype in WAYS:
        yield from _against_full(at[method, dtype, "full"], at[method, dtype, "lora"])
    for dtype in ("float32", "bfloat16"):
        for trained in TRAINED:
            ours = at["ours", dtype, trained]
            for other in (at["eager", dtype, trained], at["thunder", dtype, trained]):
                yield _no_more(ours, other, "flops", left_out=_SCORES * (other.method == "thunder"))
                yield _no_more(ours, other, "saved_bytes")
    for way in FP8_WAYS:
        yield from _in_fp8(at, way)


def _against_full(full: Point, lora: Point) -> Iterator[Claim]:
    """Check the exact FLOPs that a step with adapters saves, for our ways to train."""
    if full.method != "ours":
        return
    expected, less = _flops_left_out(), full.flops - lora.flops
    yield Claim(
        text=f"{_name(full)}: frozen weights and what is before the first adapter cost no gradient: LoRA computes "
        f"{less:,} FLOPs less, {expected:,} expected",
        holds=less == expected,
    )
    most = full.saved_bytes + _saved_more(full.dtype)
    yield Claim(
        text=f"{_name(full)}: LoRA saves what full training does, less the first input, and what adapters make between "
        f"their weights: {lora.saved_bytes:,} == {most:,}",
        holds=lora.saved_bytes == most,
    )


def _flops_left_out() -> int:
    """Return the FLOPs of the frozen weights' gradients, less those of adapters; the first input needs no gradient."""
    of_weights = BLOCKS * sum(2 * ROWS * i * o for i, o in LINEARS) + 2 * ROWS * WIDTH * CLASSES
    of_first_input = 2 * ROWS * LINEARS[0][0] * LINEARS[0][1]
    adapters = BLOCKS * sum(2 * ROWS * RANK * (i + o) for i, o in LINEARS)
    of_first_adapter = 2 * ROWS * RANK * LINEARS[0][0]
    return of_weights + of_first_input - (3 * adapters - of_first_adapter)


def _saved_more(dtype: str) -> int:
    num_elements = BLOCKS * len(LINEARS) * ROWS * RANK - ROWS * WIDTH
    return num_elements * (4 if dtype == "float32" else 2)


def _no_more(ours: Point, other: Point, what: str, *, left_out: int = 0) -> Claim:
    mine, theirs = getattr(ours, what) - left_out, getattr(other, what)
    return Claim(
        text=f"{_name(ours)} {ours.trained}: no more {what} than {other.method}: {mine:,} <= {theirs:,}",
        holds=mine <= theirs,
    )


def _in_fp8(at: dict[tuple[str, str, str], Point], dtype: str) -> Iterator[Claim]:
    for trained in TRAINED:
        fp8, plain = at["ours", dtype, trained], at["ours", "bfloat16", trained]
        yield _no_more_than_in_bfloat16(fp8, plain)
        yield Claim(
            text=f"{_name(fp8)} {trained}: the same products as in bfloat16: {fp8.flops:,} == {plain.flops:,}",
            holds=fp8.flops == plain.flops,
        )
    lora = at["ours", dtype, "lora"]
    num_linears = BLOCKS * len(LINEARS)
    # Inputs, and gradients of outputs but for the first, before which nothing is trained.
    expected = num_linears + (num_linears - 1)
    yield Claim(
        text=f"{_name(lora)} lora: only inputs and gradients are cast: {lora.num_casts} casts of {expected}",
        holds=lora.num_casts == expected,
    )
    yield Claim(
        text=f"{_name(lora)} lora: nothing is transposed: {lora.num_transposes} transposes",
        holds=lora.num_transposes == 0,
    )


def _no_more_than_in_bfloat16(fp8: Point, plain: Point) -> Claim:
    mine, theirs = fp8.saved_bytes, plain.saved_bytes
    return Claim(
        text=f"{_name(fp8)} {fp8.trained}: no more bytes saved than in bfloat16: {mine:,} <= {theirs:,}",
        holds=mine <= theirs,
    )


def _name(point: Point) -> str:
    return f"{point.method}, {point.dtype}"


def _write(points: Sequence[Point], claims: Sequence[Claim], path: Path) -> None:
    packages = ("torch", "lightning-thunder", "peft")
    result = {
        "machine": f"{platform.machine()}, one thread",
        "versions": {name: version(name) for name in packages},
        "not_run": NOT_RUN,
        "points": [asdict(p) for p in points],
        "claims": [asdict(c) for c in claims],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measures step time and bytes of sharded training on 2 gloo ranks: ours, Fabric's FSDP2 path and DDP, in one run.

    python benchmarks/sharding.py [--rounds 15] [--output benchmarks/results/sharding.json]

A step is forward and backward in float32, without the optimizer. All variants take turns in the same two processes, in
another order in every round, and a step takes as long as on the slower rank. `alone` is the same model without
communication, on both ranks at once; `added` is the median over the rounds of a variant's time beyond its own `alone`
in that round. Windows are alike: FSDP2 prefetches one block, and ours, by default, as many bytes. FSDP2 keeps weights
outside of blocks gathered from forward to backward; `root resharded` gathers them again, as ours does.

Held bytes are the peak of parameters, gradients and collectives over the operations of a step: all storages that Python
sees live, without activations, which are told apart by their size (a multiple of the prime number of tokens, which
parameters' sizes are not). Gloo's copies inside C++ are not seen: for FSDP2 a whole block's gradients, for ours a
bucket's weights.

Goal: ours holds no more than the FSDP2 variant that holds the least, and adds to its own `alone` step at most 1.1 times
the time that the fastest FSDP2 variant adds to eager's.
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
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

LENGTH = 89
"""Tokens of a batch: a prime that divides neither a parameter's size, nor that of a communicated bucket."""
LAYERS, HIDDEN, WIDE, VOCAB = 6, 256, 512, 512

OURS: dict[str, dict[str, Any]] = {
    "ours none": {"sharding": "none"},
    "ours zero2": {"sharding": "zero2"},
    "ours zero3, window 0, no buckets": {"sharding": "zero3", "prefetch": 0, "bucket": 0},
    "ours zero3, no buckets": {"sharding": "zero3", "bucket": 0},
    "ours zero3": {"sharding": "zero3"},
}
FSDP2 = ("FSDP2", "FSDP2, root resharded")


def main() -> None:
    arguments = _parser().parse_args()
    if "LOCAL_RANK" in os.environ:
        _measure_all(arguments.rounds, arguments.measured)
        return
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as directory:
        measured = Path(directory, "measured.json")
        options = ["--rounds", str(arguments.rounds), "--measured", str(measured)]
        subprocess.run([sys.executable, *launch, *options], env=environment, check=True)
        _report(json.loads(measured.read_text()), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measured", type=Path, help=argparse.SUPPRESS)
    return parser


def _measure_all(rounds: int, path: Path) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    variants = {name: _set_up(name) for name in _names()}
    ids = torch.randint(0, VOCAB, (1, LENGTH))
    for step, module in variants.values():
        for _ in range(2):  # compile, and let lazy buffers come into being
            step(ids)
        _drop_gradients(module)
    held = {name: _held_bytes(step, module, ids) for name, (step, module) in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in _in_turn(list(variants), number):
            step, module = variants[name]
            _drop_gradients(module)
            dist.barrier()
            start = time.perf_counter()
            step(ids)
            seconds[name].append(_slowest(time.perf_counter() - start))
    if dist.get_rank() == 0:
        path.write_text(json.dumps({"seconds": seconds, "held_bytes": held}))
    dist.barrier()


def _names() -> list[str]:
    return ["eager alone", "ours alone", "DDP", *FSDP2, *OURS]


def _in_turn(names: list[str], number: int) -> list[str]:
    """Rotate the order in every round, and reverse every other round, so that no variant always follows another."""
    first = number % len(names)
    turned = names[first:] + names[:first]
    return turned[::-1] if number % 2 else turned


def _slowest(seconds: float) -> float:
    import torch
    import torch.distributed as dist

    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def _set_up(name: str) -> tuple[Callable[[Any], None], Any]:
    """Return a function that runs forward and backward, and the module whose parameters get gradients."""
    import lightning as L
    import torch

    model = _model()
    if name == "eager alone":
        return _step(model, lambda loss: loss.backward()), model
    if name == "ours alone":
        from thunder_memsave.compiler.compiled_module import CompiledModule

        return _step(CompiledModule(model), lambda loss: loss.backward()), model
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=_strategy(name))
    fabric.launch()
    if name in FSDP2:
        # Fabric sets a model up for FSDP2 that was made on meta, or on the device.
        torch.manual_seed(0)
    module = fabric.setup(model)
    return _step(module, fabric.backward), module


def _strategy(name: str) -> Any:
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    if name == "DDP":
        return DDPStrategy()
    if name in FSDP2:
        shard = partial(_fully_shard, reshards_root=True if "root" in name else None)
        return ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    from thunder_memsave.strategy import ThunderMemsaveStrategy

    return ThunderMemsaveStrategy(**OURS[name])


def _fully_shard(model: Any, mesh: Any, *, reshards_root: bool | None) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=reshards_root)


def _model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def _step(module: Any, backward: Callable[[Any], None]) -> Callable[[Any], None]:
    def step(ids: Any) -> None:
        output = module(input_ids=ids, labels=ids, use_cache=False)
        backward(output["loss"])

    return step


def _drop_gradients(module: Any) -> None:
    for p in module.parameters():
        p.grad = None


def _held_bytes(step: Callable[[Any], None], module: Any, ids: Any) -> int:
    """Return the peak of live bytes of parameters, gradients and collectives over the operations of a step."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    alive: dict[int, weakref.ref[Any]] = {}
    peak = 0

    def see(values: Any) -> None:
        for t in tree_leaves(values):
            t = getattr(t, "_local_tensor", t)
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                alive[storage._cdata] = weakref.ref(storage)

    def held() -> int:
        sizes = {}
        for key, reference in list(alive.items()):
            storage = reference()
            if storage is None:
                del alive[key]
            elif storage.nbytes() % LENGTH and storage.nbytes() > 64:
                sizes[key] = storage.nbytes()
        return sum(sizes.values())

    class Storages(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal peak
            result = func(*args, **(kwargs or {}))
            see((args, kwargs, result))
            peak = max(peak, held())
            return result

    # Inside the mode compiled modules capture anew, which the second step is free of.
    for _ in range(2):
        alive.clear()
        peak = 0
        see(list(module.parameters()))
        with Storages():  # type: ignore[no-untyped-call]
            step(ids)
        _drop_gradients(module)
    return peak


def _report(measured: dict[str, Any], arguments: argparse.Namespace) -> None:
    seconds = {name: median(values) for name, values in measured["seconds"].items()}
    added = {name: median(_added(name, measured["seconds"])) for name in seconds}
    held = measured["held_bytes"]
    least_added, least_held = (min(values[name] for name in FSDP2) for values in (added, held))
    print(f"{'':34}{'step ms':>9}{'added ms':>10}{'of FSDP2':>10}{'held MiB':>10}{'of FSDP2':>10}")
    for name in seconds:
        print(
            f"{name:34}{seconds[name] * 1e3:9.1f}{added[name] * 1e3:10.1f}{added[name] / least_added:10.2f}"
            f"{held[name] / 2**20:10.2f}{held[name] / least_held:10.2f}"
        )
    goals = {
        "held bytes of ours zero3 / FSDP2, at most 1": held["ours zero3"] / least_held,
        "added seconds of ours zero3 / FSDP2, at most 1.1": added["ours zero3"] / least_added,
    }
    for goal, value in goals.items():
        print(f"{goal}: {value:.2f}, {'met' if value <= float(goal.split()[-1]) else 'MISSED'}")
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 2 ranks, 1 thread each, gloo",
        "load_average": round(os.getloadavg()[0], 1),
        "versions": {
            name: version(name)
            for name in (
                "torch",
                "lightning-thunder",
                "lightning",
                "transformers",
                "thunder-memsave",
            )
        },
        "rounds": arguments.rounds,
        "median_seconds": {k: round(v, 4) for k, v in seconds.items()},
        "added_seconds": {k: round(v, 4) for k, v in added.items()},
        "quartiles_of_added_seconds": {
            k: [round(v, 4) for v in quantiles(_added(k, measured["seconds"]), n=4)]
            for k in seconds
        },
        "fastest_seconds": {k: round(min(v), 4) for k, v in measured["seconds"].items()},
        "held_bytes": held,
        "goals": {k: round(v, 3) for k, v in goals.items()},
    }
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def _added(name: str, seconds: dict[str, list[float]]) -> list[float]:
    """Return, for each round, a variant's time beyond that of the same model without communication."""
    alone = seconds["ours alone" if name.startswith("ours") else "eager alone"]
    return [value - base for value, base in zip(seconds[name], alone, strict=True)]


if __name__ == "__main__":
    main()

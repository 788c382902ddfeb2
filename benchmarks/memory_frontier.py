"""Measures peak memory against FLOPs of a step: eager, checkpointed, torch.compile with budgets, Thunder, and ours.

    PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/memory_frontier.py [--no-times] [--output FOLDER]

Every method is a process of its own. A peak is the memory of a step beside parameters and batch, by the profiler's
memory events; FLOPs are counted by FlopCounterMode while the step runs, those of attention's CPU kernel as of its CUDA
twin; seconds are CPU seconds of the fastest step: other work on the machine only adds. Ours is planned for fractions of
its peak with all kept, for the peaks of all others, and for the smallest budget that its error names.
`--output` writes JSON, and a picture beside it.
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
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

MODELS = ("gpt", "llama", "vocabulary")
"""The third is the GPT with a vocabulary of 128,256. Others compute its loss whole and in chunks: eager by PyTorch's
`linear_cross_entropy`, which torch.compile does not trace in 2.13 (it warns), torch.compile by checkpointed parts."""
METHODS = ("eager", "torch.compile", "torch.compile, inductor", "thunder", "ours")
"""Methods; plain `torch.compile` has the backend `aot_eager_decomp_partition`: its partitions, run by eager kernels."""
COMPILE_BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
REFUSED = {("llama", "thunder"): "thunder.jit does not trace transformers 5.23's Llama"}
PARTS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25)
NUM_STEPS = 7


@dataclass(frozen=True, kw_only=True)
class Point:
    """The measurements of a step of one method."""

    method: str
    setting: str
    peak_bytes: int
    """Peak beside parameters and batch."""
    flops: int
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement that compares ours with another method."""

    text: str
    holds: bool


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.measure is not None:
        _measure(arguments)
        return
    frontiers = {model: _frontier(model, arguments) for model in arguments.models}
    claims = {model: _claims(points) for model, points in frontiers.items()}
    for model, found in claims.items():
        for claim in found:
            print(f"{model}: {'holds' if claim.holds else 'FAILS'}: {claim.text}")
    if arguments.output is not None:
        _write(frontiers, claims, arguments.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--no-times", action="store_true", help="where the machine is not quiet")
    parser.add_argument(
        "--parts",
        type=float,
        nargs="+",
        default=list(PARTS),
        help="of the peak with all kept, 1 among them",
    )
    parser.add_argument("--output", type=Path, help="path of the JSON")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--budgets", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    return parser


def _frontier(model: str, arguments: argparse.Namespace) -> list[Point]:
    points: list[Point] = []
    for method in METHODS:
        if (reason := REFUSED.get((model, method))) is not None:
            print(f"{model:6} {method:23} not run: {reason}", flush=True)
            continue
        found = _in_a_process(model, method, [p.peak_bytes for p in points], arguments)
        for point in found:
            seconds = "" if point.seconds is None else f"{point.seconds:8.3f} s"
            print(
                f"{model:6} {point.method:23} {point.setting:12} {point.peak_bytes / 2**20:9.3f} MiB "
                f"{point.flops / 1e9:9.3f} GFLOP {seconds}",
                flush=True,
            )
        points += found
    return points


def _in_a_process(
    model: str, method: str, budgets: Sequence[int], arguments: argparse.Namespace
) -> list[Point]:
    command = [sys.executable, __file__, "--models", model, "--measure", method]
    command += ["--no-times"] if arguments.no_times else []
    command += ["--parts", *map(str, arguments.parts)]
    command += ["--budgets", *map(str, budgets)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return [Point(**p) for p in json.loads(run.stdout.splitlines()[-1])]


def _measure(arguments: argparse.Namespace) -> None:
    """Measure all points of one method in this process, and print them as JSON in the last line."""
    import torch

    from thunder_memsave import compat

    compat.apply()  # before the harness imports thunder
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    (model,), method = arguments.models, arguments.measure
    runs: dict[str, Callable[[str, argparse.Namespace], Run]] = {
        "eager": _eager,
        "torch.compile": partial(_torch_compile, backend=_partitioned),
        "torch.compile, inductor": partial(_torch_compile, backend=_inductor),
        "thunder": _thunder,
        "ours": _ours,
    }
    points = [
        _point(method, setting, module, batch, has_times=not arguments.no_times)
        for setting, module, batch in runs[method](model, arguments)
    ]
    print(json.dumps([asdict(p) for p in points]))


def _model(name: str) -> tuple[Any, dict[str, Any]]:
    """Build a model that returns its loss, and a batch of 4 sequences of 256 tokens; of the large vocabulary, one."""
    import torch

    torch.manual_seed(0)
    ids = torch.randint(0, 256, (1 if name == "vocabulary" else 4, 256))
    if name == "llama":
        return _llama().train(), {"ids": ids}
    return _gpt(num_classes=128_256 if name == "vocabulary" else 256).train(), {"ids": ids}


def _gpt(*, num_classes: int) -> Any:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    width, heads = 128, 4

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            shape = (x.shape[0], x.shape[1], heads, width // heads)
            q, k, v = (
                t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, -1)
            )
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
            added: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
            return x + added

    class GPT(nn.Module):
        checkpoints = False
        loss = "whole"

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(num_classes, width)
            self.blocks = nn.ModuleList(Block() for _ in range(6))
            self.head = nn.Linear(width, num_classes, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = _checkpointed(block, x) if self.checkpoints else block(x)
            logits, targets = self.head, ids[:, 1:].flatten()
            if self.loss == "whole":
                return F.cross_entropy(logits(x)[:, :-1].flatten(0, 1), targets)
            x = x[:, :-1].flatten(0, 1)
            if self.loss == "linear_cross_entropy":
                options = nn.LinearCrossEntropyOptions()
                return F.linear_cross_entropy(x, logits.weight, targets, options=options)
            parts = zip(x.split(128), targets.split(128), strict=True)
            losses = [_checkpointed(self._sum_of_losses, *part) for part in parts]
            return torch.stack(losses).sum() / targets.numel()

        def _sum_of_losses(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), targets, reduction="sum")

    def _checkpointed(block: Any, *x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(block, *x, use_reentrant=False)
        return result

    return GPT()


def _llama() -> Any:
    import transformers
    from torch import Tensor, nn

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.LlamaForCausalLM(config)

        @property
        def checkpoints(self) -> bool:
            return self.inner.is_gradient_checkpointing

        @checkpoints.setter
        def checkpoints(self, _: bool) -> None:
            self.inner.gradient_checkpointing_enable({"use_reentrant": False})

        def forward(self, ids: Tensor) -> Tensor:
            loss: Tensor = self.inner(input_ids=ids, labels=ids).loss
            return loss

    return Llama()


Run = Iterator[tuple[str, Any, dict[str, Any]]]
"""Yields settings, each with a callable and the batch; the model is the same for all."""


def _eager(name: str, arguments: argparse.Namespace) -> Run:
    model, batch = _model(name)
    losses = ("whole", "linear_cross_entropy") if name == "vocabulary" else ("whole",)
    for loss in losses:
        label = "" if loss == "whole" else loss
        if name == "vocabulary":
            model.loss, model.checkpoints = loss, False
        yield label, model, batch
        model.checkpoints = True
        yield f"checkpointed {label}".strip(), model, batch


def _torch_compile(
    name: str, arguments: argparse.Namespace, *, backend: Callable[[_Flops], Any]
) -> Run:
    import torch

    model, batch = _model(name)
    losses = ("whole", "parts") if name == "vocabulary" else ("whole",)
    for loss, budget in product(losses, COMPILE_BUDGETS):
        model.loss = loss
        torch._dynamo.reset()
        counter = _Flops()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            compiled: Any = torch.compile(model, backend=backend(counter), fullgraph=True)
            compiled.counter = counter
            yield f"{budget:.1f}{'' if loss == 'whole' else f' {loss}'}", compiled, batch


def _partitioned(counter: _Flops) -> Any:
    """Return the backend `aot_eager_decomp_partition` with `counter` as its mode."""
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition_with_mode

    return partial(aot_eager_decomp_partition_with_mode, mode=counter)


def _inductor(counter: _Flops) -> Any:
    """Return the backend Inductor, whose graphs count their FLOPs while they run."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def counting(graph: Any, inputs: Any, **options: Any) -> Any:
        compiled = compile_fx_inner(graph, inputs, **options)

        def run(arguments: list[Any]) -> Any:
            with counter:
                return compiled(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]  # it may clear the list
        return run

    return partial(compile_fx, inner_compile=counting)


def _thunder(name: str, arguments: argparse.Namespace) -> Run:
    import thunder

    model, batch = _model(name)
    yield "", thunder.jit(model), batch


def _ours(name: str, arguments: argparse.Namespace) -> Run:
    model, batch = _model(name)
    free = _planned(model, None)
    free(**batch)
    call = free.planner.calls[-1]
    held = sum(call.program.storages[s].nbytes for s in call.program.held) + call.memory.other_bytes
    free_bytes = call.profile.peak_bytes - held
    floor_bytes = _floor_bytes(model, batch) - held
    budgets = {f"{part:.0%}": int(part * free_bytes) for part in arguments.parts}
    budgets |= {f"{n / 2**20:.3f} MiB": n for n in sorted(set(arguments.budgets), reverse=True)}
    budgets["floor"] = floor_bytes
    for setting, nbytes in budgets.items():
        if nbytes >= floor_bytes:
            yield setting, _planned(model, held + nbytes), batch


def _planned(model: Any, budget_bytes: int | None) -> Any:
    from thunder_memsave.compiler.compiled_module import CompiledModule

    return CompiledModule(model, planner=_planner(budget_bytes))


def _planner(budget_bytes: int | None) -> Any:
    from thunder_memsave.budget.memory_planner import MemoryPlanner
    from thunder_memsave.config import MemoryConfig
    from thunder_memsave.planner.devices import device

    return MemoryPlanner(MemoryConfig(), device=device("cpu"), budget_bytes=budget_bytes)


def _floor_bytes(model: Any, batch: dict[str, Any]) -> int:
    """Return the smallest budget for which a plan is found, which the error for an impossible one names."""
    from thunder_memsave.errors import BudgetError

    try:
        _planned(model, 1)(**batch)
    except BudgetError as error:
        if error.smallest_bytes is None:
            raise
        return error.smallest_bytes
    raise AssertionError("a step fits in one byte")


def _point(
    method: str, setting: str, module: Any, batch: dict[str, Any], *, has_times: bool
) -> Point:
    from harness.memory import measured_peak_bytes

    def step() -> None:
        for p in module.parameters():
            p.grad = None
        module(**batch).backward()

    def clear() -> None:
        for p in module.parameters():
            p.grad = None

    for _ in range(2):
        step()
    clear()
    peak_bytes = measured_peak_bytes(step)
    clear()
    return Point(
        method=method,
        setting=setting,
        peak_bytes=peak_bytes,
        flops=_flops(module, step),
        seconds=_seconds(step) if has_times else None,
    )


class _Flops:
    """Counts the FLOPs that run inside, summed over all times that it is entered."""

    def __init__(self) -> None:
        self.total = 0

    def __enter__(self) -> None:
        """Count the CPU's attention as the CUDA kernel of the same name, which FlopCounterMode knows."""
        import torch
        from torch.utils import flop_counter

        aten, known = torch.ops.aten, flop_counter.flop_registry
        twins = {
            aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: (
                aten._scaled_dot_product_flash_attention_backward
            ),
        }
        missing = {cpu: _of_tensors(known[cuda]) for cpu, cuda in twins.items() if cpu not in known}
        chunked = getattr(torch.ops.torch_nn, "_linear_cross_entropy_batch_chunked", None)
        if chunked is not None:  # it is registered when it is first called
            missing[chunked] = _of_chunks
        self._counter = flop_counter.FlopCounterMode(display=False, custom_mapping=missing)
        # Not the counter itself: its hooks on all modules would be a reason to capture again.
        self._mode = flop_counter._FlopCounterMode(self._counter)
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self.total += self._counter.get_total_flops()


def _flops(module: Any, step: Callable[[], None]) -> int:
    """Count the FLOPs of a step; Dynamo's graphs count inside, as Dynamo does not run them while a mode is active."""
    inside: _Flops | None = getattr(module, "counter", None)
    if inside is not None:
        before = inside.total
        step()
        return inside.total - before
    with _Flops():
        step()  # a mode is a reason to capture again, whose fake tensors would count too
    outside = _Flops()
    with outside:
        step()
    return outside.total


def _of_tensors(formula: Callable[..., int]) -> Callable[..., int]:
    """Mark a formula as taking tensors, so that FlopCounterMode does not wrap it to take shapes."""

    def count(*args: Any, **kwargs: Any) -> int:
        return formula(*args, **kwargs)

    count._get_raw = True  # type: ignore[attr-defined]  # what FlopCounterMode asks
    return count


def _of_chunks(hidden: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of PyTorch's `linear_cross_entropy` by shapes: logits and both gradients."""
    return 3 * 2 * hidden[0] * weight[0] * weight[1]


def _seconds(step: Callable[[], None]) -> float:
    seconds = []
    for _ in range(NUM_STEPS):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return min(seconds)


def _claims(points: Sequence[Point]) -> list[Claim]:
    """Compare ours with checkpointing at equal peak and at equal FLOPs, and with every budget of torch.compile."""
    ours = [p for p in points if p.method == "ours"]
    claims: list[Claim] = []
    for other in points:
        fits = [p for p in ours if p.peak_bytes <= other.peak_bytes]
        as_cheap = [p for p in ours if p.flops <= other.flops]
        label = f"{other.method} {other.setting}".strip()
        if other.setting.startswith("checkpointed"):
            claims += [
                Claim(
                    text=f"at the peak of {label} ours computes fewer FLOPs: {_least(fits, 'flops')} < {other.flops:,}",
                    holds=any(p.flops < other.flops for p in fits),
                ),
                Claim(
                    text=f"at the FLOPs of {label} ours has no higher peak: {_least(as_cheap, 'peak_bytes')} <= "
                    f"{other.peak_bytes:,}",
                    holds=any(p.peak_bytes <= other.peak_bytes for p in as_cheap),
                ),
            ]
        elif other.method == "thunder":
            # Its attention is made of products, whose FLOPs are counted otherwise than those of a kernel.
            least = min(p.peak_bytes for p in ours if p.setting == "100%")
            claims.append(
                Claim(
                    text=f"with all kept ours has a lower peak than {label}: {least:,} < "
                    f"{other.peak_bytes:,}",
                    holds=least < other.peak_bytes,
                )
            )
        elif other.method != "ours":
            claims.append(
                Claim(
                    text=f"ours is at or below the peak of {label} ({other.peak_bytes:,}) with no more FLOPs: "
                    f"{_least(fits, 'flops')} <= {other.flops:,}",
                    holds=any(p.flops <= other.flops for p in fits),
                )
            )
    return claims


def _least(points: Sequence[Point], what: str) -> str:
    return f"{min(getattr(p, what) for p in points):,}" if points else "none"


def _write(frontiers: dict[str, list[Point]], claims: dict[str, list[Claim]], path: Path) -> None:
    packages = ("torch", "lightning-thunder", "transformers")
    result = {
        "machine": f"{platform.machine()}, one thread",
        "versions": {name: version(name) for name in packages},
        "not_run": {f"{method} of {model}": why for (model, method), why in REFUSED.items()},
        "points": {model: [asdict(p) for p in points] for model, points in frontiers.items()},
        "claims": {model: [asdict(c) for c in found] for model, found in claims.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _plot(frontiers, path.with_suffix(".png"))


def _plot(frontiers: dict[str, list[Point]], path: Path) -> None:
    import matplotlib.pyplot as plt

    has_times = any(p.seconds is not None for points in frontiers.values() for p in points)
    rows = 2 if has_times else 1
    figure, axes = plt.subplots(
        rows, len(frontiers), figsize=(6 * len(frontiers), 4.5 * rows), squeeze=False
    )
    for column, (model, points) in enumerate(frontiers.items()):
        _plot_against(axes[0][column], points, lambda p: p.flops / 1e9, "GFLOP of a step")
        axes[0][column].set_title(model)
        if has_times:
            _plot_against(
                axes[1][column], points, lambda p: p.seconds, "processor seconds of a step"
            )
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _plot_against(
    axis: Any, points: Sequence[Point], of: Callable[[Point], Any], label: str
) -> None:
    for number, method in enumerate(METHODS):
        own = sorted((p for p in points if p.method == method), key=lambda p: p.peak_bytes)
        line = "o-" if method == "ours" else "o"  # others' points need not be a frontier
        axis.plot(
            [p.peak_bytes / 2**20 for p in own],
            [of(p) for p in own],
            line,
            color=f"C{number}",
            label=method,
        )
    axis.set_xlabel("peak beside weights and batch, MiB")
    axis.set_ylabel(label)


if __name__ == "__main__":
    main()

"""Trains a small Llama on several processes: as on one, beside its communication, and with a rank that fails.

On GPUs one process each, over nccl; on a CPU two, over gloo. What a process does is `rank_steps.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.checks import Check, Measured, NotRunError, Target, WrongError, require

MOST_RANKS = 8
TIMEOUT_S = 20
CLOSE = 1e-4
"""Relative: sums over ranks are added up in another order, in float32."""
LEAST_OVERLAP = 0.3
"""Part of the time of nccl's kernels in which another kernel runs."""
_LIMIT_S = 240.0


def num_ranks(target: Target) -> int:
    """Return how many processes there are; raise if this machine has too few GPUs."""
    if not target.is_cuda:
        return 2
    import torch

    found = torch.cuda.device_count()
    if found < 2:
        raise NotRunError(f"needs 2 GPUs, and this machine has {found}")
    return min(found, MOST_RANKS)


def parity(target: Target, sharding: str) -> Measured:
    """Compare losses and norms of gradients with those of one process on the same rows."""
    ranks = num_ranks(target)
    alone = _steps(target, 1, "train")
    found = _steps(target, ranks, "train", f"--sharding={sharding}")
    worst = 0.0
    for key in ("losses", "norms"):
        pairs = list(zip(alone[key], found[key], strict=True))
        worst = max(worst, *(abs(b - a) / abs(a) for a, b in pairs))
    numbers = {"one": alone, "ranks": found, "worst": worst}
    if not worst <= CLOSE:
        raise WrongError(
            f"{sharding} on {ranks} ranks: off by {worst:.1e}, allowed are {CLOSE}", numbers
        )
    return Measured(line=f"{sharding} on {ranks} ranks: within {worst:.1e}", numbers=numbers)


def overlap(target: Target) -> Measured:
    """Measure how much of nccl's time is hidden, and what a step takes with and without gathers in advance."""
    ranks = num_ranks(target)
    ahead = _steps(target, ranks, "overlap", "--sharding=zero3")
    at_once = _steps(target, ranks, "overlap", "--sharding=zero3", "--prefetch=0")
    part, before = ahead["hidden"], at_once["hidden"]
    line = (
        f"{part:.0%} of nccl's time is hidden, {before:.0%} without prefetch; a step takes "
        f"{ahead['ms']:.1f} ms, {at_once['ms']:.1f} ms without"
    )
    numbers = {"prefetch": ahead, "without": at_once}
    if part < LEAST_OVERLAP:
        raise WrongError(f"{line}; at least {LEAST_OVERLAP:.0%} was expected", numbers)
    return Measured(line=line, numbers=numbers)


def hanging(target: Target) -> str:
    """Stop one rank for good: the others say which one within the timeout, and all end."""
    ranks = num_ranks(target)
    start = time.monotonic()
    run = _launch(target, ranks, "hang", f"--timeout={TIMEOUT_S}", output=Path(os.devnull))
    seconds = time.monotonic() - start
    require(run.returncode != 0, "the run ended as if nothing had happened")
    named = f"rank {ranks - 1} did not give up with the others"
    text = " ".join(run.stderr.split()).lower()
    if named not in text and not (target.is_cuda and "timeout" in text):
        raise WrongError(f"nobody said '{named}'", {"stderr": run.stderr[-4000:]})
    who = "the other ranks" if named in text else "nccl's watchdog"
    return f"ended after {seconds:.0f} s, told by {who}"


def out_of_memory(target: Target) -> str:
    """Let one rank run out of memory: it says so, and the others end."""
    ranks = num_ranks(target)
    run = _launch(target, ranks, "oom", f"--timeout={TIMEOUT_S}", output=Path(os.devnull))
    require(run.returncode != 0, "the run ended as if nothing had happened")
    require("out of memory" in run.stderr.lower(), "nobody said 'out of memory'")
    return f"rank {ranks - 1} ran out of memory, and all ended"


def _steps(target: Target, ranks: int, case: str, *options: str) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "found.json")
        run = _launch(target, ranks, case, *options, output=output)
        if run.returncode != 0 or not output.exists():
            last = (run.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise WrongError(
                f"{case} on {ranks} ended with exit code {run.returncode}: {last[:300]}",
                {"stderr": run.stderr[-4000:]},
            )
        return dict(json.loads(output.read_text()))


def _launch(
    target: Target, ranks: int, case: str, *options: str, output: Path
) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = ["-m", "gpu.rank_steps", case, f"--device={target.device}", f"--output={output}"]
    return subprocess.run(
        [sys.executable, "-W", "ignore", *launch, *script, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


CHECKS = [
    *(
        Check(
            name=f"as one process, {mode}",
            run=lambda target, mode=mode: parity(target, mode),  # type: ignore[misc]
            group="ranks",
            limit_s=_LIMIT_S,
        )
        for mode in ("zero2", "zero3")
    ),
    Check(name="overlap", run=overlap, needs_cuda=True, limit_s=_LIMIT_S),
    Check(name="a rank that hangs", run=hanging, limit_s=_LIMIT_S),
    Check(name="a rank out of memory", run=out_of_memory, needs_cuda=True, limit_s=_LIMIT_S),
]

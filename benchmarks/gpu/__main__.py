"""`python -m gpu correct`, `speed`, `product` or `ranks`: run one part, and write its results."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

from gpu.checks import Check, Target
from gpu.machine import asked, described
from gpu.processes import REPORT_TO, run_all, run_here
from gpu.report import table, update_docs, write

_OF_FP8 = ("fp8", "fp8_casts")
MODULES = {
    "correct": ("kernels", "losses", "plans", "fusion", *_OF_FP8, "system", "memory", "offload"),
    "speed": ("rates", "speed", "anchors"),
    "product": ("product",),
    "ranks": ("ranks",),
}
"""The modules that have the checks of a part."""
RESULTS = Path(__file__).parents[1] / "results"
MEMORY_PAGE = Path(__file__).parents[2] / "docs/memory.md"


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.part == "machine":
        print(json.dumps(described(arguments.device)))
        return 0
    machine = {} if arguments.here else asked(arguments.device)
    if "missing" in machine:  # before imports, which take seconds
        print(f"make gpu-{arguments.part}: {machine['missing']}", file=sys.stderr)
        return 1
    target = Target(arguments.device)
    checks = [
        c for c in checks_of(arguments.part) if not arguments.only or c.name in arguments.only
    ]
    if arguments.here:
        run_here([c for c in checks if c.name in arguments.here], target, report_to=REPORT_TO)
        return 0
    start = time.monotonic()
    outcomes = run_all(
        arguments.part, checks, target, seconds=60 * arguments.minutes, workers=arguments.workers
    )
    seconds = time.monotonic() - start
    print(table(outcomes, arguments.part, machine, seconds=seconds))
    path = write(outcomes, arguments.part, machine, arguments.output, seconds=seconds)
    print(f"written: {path} and {path.with_suffix('.md').name}")
    if arguments.device == "cuda" and arguments.part == "correct":
        update_docs(arguments.docs, outcomes, machine)
    return int(any(o.state == "failed" for o in outcomes))


def checks_of(part: str) -> list[Check]:
    """Return the checks of a part, in order."""
    from thunder_memsave import compat

    compat.apply()  # before thunder is imported
    modules = [importlib.import_module(f"gpu.{name}") for name in MODULES[part]]
    return [check for module in modules for check in module.CHECKS]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    parser.add_argument("part", choices=[*MODULES, "machine"])
    parser.add_argument("--minutes", type=float, default=9.5, help="after these, checks end")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--only", nargs="*", help="names of checks, all others are left out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--docs", type=Path, default=MEMORY_PAGE, help=argparse.SUPPRESS)
    parser.add_argument("--here", nargs="*", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())

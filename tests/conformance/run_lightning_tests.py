"""Runs Lightning's own DDP clipping tests with our strategy in DDP's place.

    LIGHTNING_CHECKOUT=<a checkout of Lightning-AI/pytorch-lightning> \
        python tests/conformance/run_lightning_tests.py

Each test runs in a process of its own, because Fabric's launcher starts pytest a second time for
the other rank. Exit code 0: all passed; 1: some failed; 2: not run, there is no checkout.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

VARIABLE = "LIGHTNING_CHECKOUT"
TEST_FILE = Path("tests_fabric/strategies/test_ddp_integration.py")
CASES = tuple(
    f"test_clip_gradients[{kind}-cpu-{precision}]"
    for kind in ("norm", "val")
    for precision in ("32-true", "bf16-mixed")
)
NOT_RUN = 2


def main() -> int:
    """Run every case and report the results."""
    tests = Path(os.environ.get(VARIABLE, "")) / "tests"
    if VARIABLE not in os.environ or not (tests / TEST_FILE).is_file():
        print(
            f"NOT RUN: {VARIABLE} is {os.environ.get(VARIABLE)!r}, which is no checkout of "
            f"Lightning-AI/pytorch-lightning (tests/{TEST_FILE} is missing)."
        )
        return NOT_RUN
    failed = [case for case in CASES if not passes(tests, case)]
    print(f"{len(CASES) - len(failed)} of {len(CASES)} of Lightning's tests passed")
    return 1 if failed else 0


def passes(tests: Path, case: str) -> bool:
    """Run one case on two ranks."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "replicated_plugin"]
    # Without its configuration: that is for the checkout's own sources.
    command += ["-p", "no:cacheprovider", "--rootdir", str(tests), f"{TEST_FILE}::{case}"]
    process = subprocess.run(
        command, cwd=tests, env=environment(tests), capture_output=True, text=True, check=False
    )
    # A skipped test must not count as one that passed.
    passed = process.returncode == 0 and "1 passed" in process.stdout
    print(f"{'passed' if passed else 'FAILED'}: {case}")
    if not passed:
        print(process.stdout[-4000:], process.stderr[-2000:])
    return passed


def environment(tests: Path) -> dict[str, str]:
    """Return an environment with Lightning's switches for another strategy and for its tests of two processes."""
    return {
        **os.environ,
        "LT_STRATEGY": "thunder_memsave",
        "LT_ACCELERATOR": "cpu",
        "PL_RUN_STANDALONE_TESTS": "1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), str(Path(__file__).parent)]),
    }


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())

"""The checks for a GPU run on a CPU as far as it goes, and every one is reported; what hangs or crashes ends alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.forked_python import ForkedPython

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

FAULTY = """
import os, signal, time
from gpu.checks import Check, WrongError

def hang(target):
    time.sleep(60)

def crash(target):
    os.kill(os.getpid(), signal.SIGSEGV)

def wrong(target):
    raise WrongError("1 is not 2", {"found": 1})

def leave(target):
    os._exit(7)

CHECKS = [
    Check(name="right", run=lambda target: "as it must be"),
    Check(name="hangs", run=hang, limit_s=1),
    Check(name="wrong", run=wrong),
    Check(name="crashes", run=crash),
    Check(name="leaves", run=leave),
    Check(name="on CUDA", run=hang, needs_cuda=True),
    Check(name="last", run=lambda target: "as it must be"),
]
"""


def run_part(
    part: str, output: Path, *options: str, path: Path = BENCHMARKS, device: str = "cpu"
) -> subprocess.CompletedProcess[str]:
    search = [str(path), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    process = ForkedPython(
        [
            *("-W", "ignore", "-m", "gpu", part, "--device", device),
            *("--output", str(output), "--docs", str(output / "memory.md"), *options),
        ],
        num_children=1,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    printed, errors = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, printed, errors)


def outcomes(output: Path) -> dict[str, Any]:
    (path,) = output.glob("gpu_*_cpu.json")
    assert path.with_suffix(".md").exists()
    return {o["name"]: o for o in json.loads(path.read_text())["outcomes"]}


def test_every_check_of_correct_is_reported_on_a_cpu(tmp_path: Path) -> None:
    run = run_part("correct", tmp_path)
    found = outcomes(tmp_path)
    states = {name: o["state"] for name, o in found.items()}
    assert run.returncode == 0, (states, run.stderr)
    assert len(found) >= 24
    assert set(states.values()) == {"passed", "not run"}
    assert all(o["reason"] for o in found.values())
    on_cuda = {name for name, o in found.items() if o["reason"] == "needs CUDA"}
    assert on_cuda >= {
        "expandable segments",
        "no host synchronisation in a step",
        "out of memory in backward",
        "scratch of flash attention's backward",
        "memory, every weight",
        "memory, LoRA, expandable segments",
    }
    assert {states[name] for name in on_cuda} == {"not run"}
    for name in (
        "causal attention",
        "Llama, bfloat16, packed rows",
        "dropout",
        "fp8, torch, block",
    ):
        assert states[name] == "passed", found[name]
    assert not (tmp_path / "memory.md").exists()  # nothing was measured


def test_a_check_that_hangs_or_crashes_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    faulty = tmp_path / "faulty"
    faulty.mkdir()
    (faulty / "faulty_checks.py").write_text(textwrap.dedent(FAULTY))
    (faulty / "run_faulty.py").write_text(
        "import sys\n"
        "import gpu.__main__ as command\n"
        "import faulty_checks\n"
        "command.checks_of = lambda part: faulty_checks.CHECKS\n"
        "sys.exit(command.main())\n"
    )
    # Processes of checks are started as `-m gpu`, so that name leads to these checks.
    (faulty / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'gpu' in sys.orig_argv and '--here' in sys.orig_argv:\n"
        "    import importlib, types\n"
        "    import faulty_checks\n"
        # They import torch and the package before their first check, which takes seconds.
        "    package = types.ModuleType('thunder_memsave')\n"
        "    package.compat = types.SimpleNamespace(apply=lambda: None)\n"
        "    sys.modules['thunder_memsave'] = package\n"
        "    names = 'kernels losses plans fusion fp8 fp8_casts system memory offload'\n"
        "    for name in names.split():\n"
        "        module = types.ModuleType('gpu.' + name)\n"
        "        module.CHECKS = faulty_checks.CHECKS if name == 'kernels' else []\n"
        "        sys.modules['gpu.' + name] = module\n"
    )
    search = os.pathsep.join([str(faulty), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(faulty / "run_faulty.py"), "correct"]
    run = subprocess.run(
        [*command, "--device", "cpu", "--output", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    found = {name: (o["state"], o["reason"]) for name, o in outcomes(tmp_path).items()}
    assert found == {
        "right": ("passed", "as it must be"),
        "hangs": ("failed", "it had not ended after 1 s"),
        "wrong": ("failed", "1 is not 2"),
        "crashes": ("failed", "its process was ended by SIGSEGV"),
        "leaves": ("failed", "its process ended with exit code 7"),
        "on CUDA": ("not run", "needs CUDA"),
        "last": ("passed", "as it must be"),
    }, run.stderr
    assert run.returncode == 1


def test_measured_memory_goes_between_the_markers_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu.checks import Outcome
    from gpu.report import update_docs

    page = tmp_path / "memory.md"
    text = (ROOT / "docs/memory.md").read_text()
    page.write_text(text)
    machine = {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}}
    not_run = Outcome(name="memory, LoRA", state="not run", reason="needs CUDA")
    update_docs(page, [not_run], machine)
    assert page.read_text() == text
    point = {
        "trained": "LoRA",
        "budget": "smallest",
        "expandable": True,
        "predicted": 4 * 2**30,
        "allocated": 5 * 2**30,
        "simulated_reserved": None,
        "reserved": 6 * 2**30,
    }
    for _ in range(2):  # what was written before is replaced
        outcome = Outcome(
            name="memory, LoRA", state="passed", reason="", numbers={"points": [point]}
        )
        update_docs(page, [outcome], machine)
        before, _, rest = page.read_text().partition("<!-- measured on a GPU -->\n")
        written, _, after = rest.partition("<!-- end of measured -->")
        assert text.startswith(before)
        assert text.endswith(after)
        (row,) = [line for line in written.splitlines() if line.startswith("| LoRA")]
        assert row == (
            "| LoRA | smallest | 4.00 GiB | 5.00 GiB (+25.0%) | not known | 6.00 GiB (+50.0%) | on |"
        )
        assert "on one NVIDIA H200 with torch 2.11.0" in written


@pytest.mark.soak
def test_every_check_of_ranks_is_reported_on_a_cpu(tmp_path: Path) -> None:
    run = run_part("ranks", tmp_path)
    found = {name: (o["state"], o["reason"]) for name, o in outcomes(tmp_path).items()}
    assert run.returncode == 0, (found, run.stderr)
    assert found["overlap"] == found["a rank out of memory"] == ("not run", "needs CUDA")
    assert {state for state, _ in found.values()} == {"passed", "not run"}
    assert found["a rank that hangs"][1].endswith("told by the other ranks")


def test_communication_is_hidden_where_something_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu.rank_steps import hidden_part

    sent = (True, 10.0, 20.0)
    assert hidden_part([sent]) == 0.0
    assert hidden_part([(False, 0.0, 30.0)]) == 0.0
    computed = [(False, 8.0, 12.0), (False, 11.0, 13.0), (False, 18.0, 40.0)]
    assert hidden_part([sent, *computed]) == 0.5
    assert hidden_part([sent, (True, 30.0, 40.0), *computed]) == 0.75


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_line_says_what_is_missing(tmp_path: Path) -> None:
    for part in ("correct", "speed", "product", "ranks"):
        run = run_part(part, tmp_path, device="cuda")
        assert run.returncode == 1
        assert run.stdout == ""
        (line,) = run.stderr.splitlines()
        assert line.startswith(f"make gpu-{part}: torch {torch.__version__} ")
        assert line.endswith("; this part runs on a CUDA device")
        assert not list(tmp_path.glob("gpu_*"))

"""`thunder-memsave plan`: what a run would hold, whether it fits, and the exit code that says so."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from thunder_memsave.budget import plan_request
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.plan.plan_command import PlanOptions, parse_options
from thunder_memsave.finetune.plan.plan_progress import STAGES
from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.planner.report.explain import in_units
from thunder_memsave.planner.search.solve import solve
from thunder_memsave.settings.problems import ConfigError

LENGTH = 64


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other budgets, and the smallest of a run that does not fit, are searched for less long."""
    monkeypatch.setattr(plan_request, "solve", partial(solve, time_limit_s=0.3))
    for name in ("_SMALLEST_S", "_CURVE_S"):
        monkeypatch.setattr(f"thunder_memsave.finetune.plan.run_planner.{name}", 0.01)


@pytest.fixture(autouse=True)
def _no_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that would fit is not looked for: `test_other_formats.py` does that."""
    monkeypatch.setattr("thunder_memsave.finetune.plan.cheapest_change._MOST_PLANS", 0)


def planned(run_file: str, tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    report = tmp_path / "plan.json"
    code = main(["plan", run_file, f"--json={report}", *options])
    return code, json.loads(report.read_text())


def test_a_run_that_fits_ends_with_0_and_says_what_it_holds(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "plan.html"
    code, plan = planned(run_file, tmp_path, "--world-size", "4", f"--html={html}")
    output, progress = capsys.readouterr()
    assert code == 0
    assert plan["fits"]
    assert plan["world_size"] == 4
    assert plan["predicted_peak_bytes"] == sum(plan["peak_bytes_by_kind"].values())
    assert plan["smallest_budget_bytes"] <= plan["predicted_peak_bytes"] <= plan["budget_bytes"]
    assert "org/not-here on 4 ranks of h200, 2 rows of 64 tokens each" in output
    for words in ("optimizer state", "activations", "smallest budget with a plan:", "it fits:"):
        assert words in output
    reserved = plan["reserved_simulated"]
    assert reserved["allocated_bytes"] >= plan["predicted_peak_bytes"]
    assert reserved["reserved_bytes"] > reserved["allocated_bytes"]
    assert reserved["reserved_bytes"] % (2 << 20) == 0
    assert "reserved by PyTorch's allocator, simulated: " in output
    nccl_bytes = plan["outside_bytes"]["nccl's buffers"]
    outside = f"512.00 MiB of CUDA's context, {in_units(nccl_bytes)} of nccl's buffers"
    assert f"outside of PyTorch's allocator, estimated: {outside}\n" in output
    assert "warning" not in output
    page = html.read_text()
    assert len(page) < 300_000
    assert "<canvas" in page
    shown = re.findall(r"^\[[ \d]+/\d+\] (.*) \.\.\. \d+\.\d s$", progress, re.MULTILINE)
    assert shown == list(plan["cpu_seconds"]) == list(STAGES)
    assert "s of it to solve: no plan recomputes less" in output
    assert plan["gap"] == 0.0


@pytest.mark.usefixtures("_quick")
def test_a_run_that_does_not_fit_ends_with_3_and_the_smallest_budget(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = ("--budget", "66000KiB", "--memory.limits=tensors")  # 64 MiB of it are cuBLAS's
    code, plan = planned(run_file, tmp_path, *tight)
    assert code == 3
    assert not plan["fits"]
    assert plan["predicted_peak_bytes"] == plan["smallest_budget_bytes"] > 66000 << 10
    assert "it does not fit: the budget is 64.45 MiB, and the smallest" in capsys.readouterr().out


@pytest.mark.usefixtures("_quick")
def test_a_budget_is_of_reserved_bytes_and_names_the_smallest_that_works(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan = planned(run_file, tmp_path, "--budget=66680KiB")
    smallest = plan["smallest_budget_bytes"]
    assert code == 3
    assert plan["predicted_peak_bytes"] < 66680 << 10 < smallest
    assert smallest == plan["reserved_simulated"]["reserved_bytes"]
    shown = f"{in_units(smallest)} reserved"
    assert f"the tables above are for {shown}" in capsys.readouterr().out
    code, plan = planned(run_file, tmp_path, f"--budget={smallest}")
    assert code == 0
    assert plan["reserved_simulated"]["reserved_bytes"] <= smallest
    output = capsys.readouterr().out
    assert f"it fits: {shown} of {in_units(smallest)}." in output
    assert re.search(r"smallest budget with a plan: about .* of tensors$", output, re.MULTILINE)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--memory.reserve=512MiB", "raise memory.reserve by that."),
        ("--budget=138GiB", "lower memory.budget by that."),
    ],
)
def test_a_budget_that_leaves_nccl_too_little_is_warned_of(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, advice: str
) -> None:
    code, plan = planned(run_file, tmp_path, "--world-size=4", option)
    assert code == 0
    # 512 MiB of 139 GiB are left beside CUDA's context.
    lacking = in_units(plan["outside_bytes"]["nccl's buffers"] - (512 << 20))
    assert (
        f"warning: the budget leaves {lacking} less of the h200 than what is outside of PyTorch's allocator is "
        f"estimated to need; {advice}" in capsys.readouterr().out
    )


def test_ctrl_c_ends_a_plan_at_once_with_one_line_and_130(run_file: str) -> None:
    command = [sys.executable, "-m", "thunder_memsave", "plan", run_file, "--world-size=4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        shown = b""
        while b"capture ... " not in shown:  # Dynamo runs then, which catches exceptions
            shown += os.read(process.stderr.fileno(), 1000)
            assert process.poll() is None, shown.decode()
        process.send_signal(signal.SIGINT)
        interrupted = time.monotonic()
        output, rest = process.communicate()
    assert time.monotonic() - interrupted < 5.0  # milliseconds on an idle machine
    assert process.returncode == 130
    assert output == b""
    assert rest.decode().splitlines()[-1] == "interrupted."
    assert b"Traceback" not in rest


@pytest.mark.usefixtures("_quick")
def test_the_plan_of_a_cpu_has_no_budget_and_reserves_nothing(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan = planned(run_file, tmp_path, "--device=cpu", "--train.micro_batch_size=1")
    assert code == 0
    assert plan["budget_bytes"] is None
    assert plan["reserved_simulated"] is None
    assert "reserved" not in capsys.readouterr().out


def test_the_smallest_budget_is_of_what_is_pinned(run_file: str, tmp_path: Path) -> None:
    _, plan = planned(run_file, tmp_path, "--memory.keep=[base_model]")
    assert plan["smallest_budget_bytes"] == plan["keep_all_peak_bytes"]


@pytest.mark.usefixtures("_quick")
def test_every_weight_in_bfloat16_under_autocast_is_planned(run_file: str, tmp_path: Path) -> None:
    code, plan = planned(run_file, tmp_path, "--lora=null")
    assert code == 0
    assert plan["peak_bytes_by_kind"]["optimizer"] > plan["peak_bytes_by_kind"]["parameter"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--device=h300"],
            "--device is 'h300', which is not known; did you mean 'h200'? Known are",
        ),
        (
            ["--world-size=none"],
            "--world-size is 'none', but must be a whole number of at least 1.",
        ),
        (["--budget"], "--budget needs a value, such as --budget=60GiB."),
        (["--json", "--html=x"], "--json needs a value, such as --json=plan.json."),
        (
            ["--json=nowhere/plan.json"],
            "there is no directory nowhere; make it, or name a file else",
        ),
        (["--html=/"], "--html is /, which is a directory; name a file in it."),
        (["--budget=much"], "memory.budget: 'much' is not a number of bytes"),
        (
            ["--model.architecture=null"],
            "a plan of org/not-here needs its config, and downloads noth",
        ),
        (["--memory.keep=[nothing]"], "memory.keep has 'nothing', which names no module"),
        (["--train.epochs=0"], "train.epochs is 0, but must be a whole number of at least 1"),
    ],
)
def test_what_is_wrong_ends_with_2(
    run_file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", run_file, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_options_may_stand_anywhere_with_or_without_equals() -> None:
    options, rest = parse_options(["--device", "H100", "run.yaml", "--world-size=8", "--lora.r=4"])
    assert options == PlanOptions(num_ranks=8, device=DEVICES["h100"])
    assert rest == ["run.yaml", "--lora.r=4"]
    with pytest.raises(ConfigError, match="--world-size is '0'"):
        parse_options(["--world-size", "0"])


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    output = capsys.readouterr().out
    assert "--world-size N" in output
    assert "--memory.budget" in output


@pytest.mark.parametrize(
    ("num_ranks", "kept"), [("1", "nf4"), ("2", "nf4"), ("2", "int8"), ("2", "mxfp4")]
)
def test_frozen_weights_of_fewer_bytes_are_planned_as_bytes(
    num_ranks: str, kept: str, run_file: str, compiled: list[Compiled]
) -> None:
    """Within a budget, where the same trace is planned in tiles too; each copy is made where it is read.

    Nothing before the first layer is trained, so backward does not read three of its weights.
    """
    options = ["--device", "h100", "--world-size", num_ranks, f"--model.frozen_weights={kept}"]
    assert main(["plan", run_file, *options]) == 0
    (found,) = compiled
    forward, backward = found.forward_traces[-1], found.backward_traces[-1]
    stored = [a for a in forward.args if "uint8" in str(getattr(a, "dtype", ""))]
    assert len(stored) == 3 * 7
    made = [
        sum(b.sym.name == f"{kept}_dequantized" for b in trace.bound_symbols)
        for trace in (forward, backward)
    ]
    assert made[0] == 3 * 7
    assert made[1] == (3 * 7 - 3 if num_ranks == "2" else 0)

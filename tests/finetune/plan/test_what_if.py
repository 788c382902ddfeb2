"""`plan --what-if` plans the run with one thing changed at a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.plan import what_if
from thunder_memsave.finetune.plan.other_formats import with_values
from thunder_memsave.finetune.plan.search.forecast import Forecast
from thunder_memsave.finetune.plan.what_if import WhatIf, what_if_table
from thunder_memsave.finetune.run_file.config import ModelConfig, RunConfig, TrainConfig
from thunder_memsave.planner.devices import DEVICES

ARCHITECTURE = {"model_type": "llama", "max_position_embeddings": 2048}


def changes(config: RunConfig, *, device: str = "h100", num_ranks: int = 4) -> list[str]:
    return [c.shown for c in what_if._changes(config, DEVICES[device], num_ranks)]


def config_of(length: int = 1024, **train: int) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(name_or_path="org/none", architecture=ARCHITECTURE),
        train=TrainConfig(**train),  # type: ignore[arg-type]  # numbers alone
    )
    return with_values(config, {"data.max_seq_length": length})


def test_ranks_devices_rows_and_lengths_change() -> None:
    assert changes(config_of(global_batch_size=32, micro_batch_size=2)) == [
        "--world-size=2",
        "--world-size=8",
        "--device=l40s",
        "--device=h200",
        "--train.micro_batch_size=1",
        "--train.micro_batch_size=4",
        "--data.max_seq_length=512",
        "--data.max_seq_length=2048",
    ]


def test_what_cannot_be_is_left_out() -> None:
    """One rank has no half, one row neither, and the model no more positions; the largest device has none above it."""
    config = config_of(2048, global_batch_size=2, micro_batch_size=1)
    assert changes(config, device="b200", num_ranks=1) == [
        "--world-size=2",
        "--device=h200",
        "--train.micro_batch_size=2",
        "--data.max_seq_length=1024",
    ]
    odd = config_of(128, global_batch_size=3, micro_batch_size=1)
    assert changes(odd, device="cpu", num_ranks=3) == [
        "--world-size=1",
        "--data.max_seq_length=256",
    ]


def test_the_rows_of_an_optimizer_step_stay() -> None:
    config = config_of(gradient_accumulation_steps=4, micro_batch_size=2)  # 32 rows on 4 ranks
    shown = changes(config)
    assert "--train.micro_batch_size=1 --train.gradient_accumulation_steps=8" in shown
    of_half = next(
        c for c in what_if._changes(config, DEVICES["h100"], 4) if c.shown == "--world-size=2"
    )
    assert of_half.values == {"train.gradient_accumulation_steps": 8}


def test_each_change_is_planned_shown_and_written(
    run_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_changes = what_if._changes
    wanted = {"--device=h200", "--train.micro_batch_size=1"}
    monkeypatch.setattr(
        what_if, "_changes", lambda *args: [c for c in all_changes(*args) if c.shown in wanted]
    )
    report, page = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = ["--what-if", f"--json={report}", f"--html={page}", "--device=b200"]
    assert main(["plan", run_file, "--world-size=2", *arguments]) == 0
    plan = json.loads(report.read_text())
    found = {each["change"]: each for each in plan["what_if"]}
    assert set(found) == {"", *wanted}
    output, progress = capsys.readouterr()
    assert "\n(the run as it is) " in output
    for change in wanted:
        assert f"\nwhat if {change}\n" in progress
        assert f"\n{change} " in output
        assert f"<td>{change}</td>" in page.read_text()
    own = found[""]
    assert own["peak_bytes"] == plan["reserved_simulated"]["reserved_bytes"]
    fewer_rows = found["--train.micro_batch_size=1"]
    assert fewer_rows["forecast_tokens_per_s"] < own["forecast_tokens_per_s"]
    assert found["--device=h200"]["budget_bytes"] < own["budget_bytes"]


def test_what_does_not_fit_and_what_cannot_be_planned_say_so() -> None:
    made = Forecast(
        fits=False,
        peak_bytes=3 << 30,
        budget_bytes=2 << 30,
        constant_bytes=1 << 30,
        least_bytes=3 << 30,
        recompute_share=0.1,
        recomputes_for_budget=True,
        tokens_per_s=100.0,
    )
    rows = [
        WhatIf(change="", forecast=dataclasses.replace(made, fits=True)),
        WhatIf(change="--a=1", forecast=made),
        WhatIf(change="--b=2", forecast=None, reason="no such thing."),
    ]
    head, own, first, second, note = what_if_table(rows).splitlines()
    assert head.split() == ["what", "if", "needs", "recomputed", "tokens/s"]
    assert own.split()[-2:] == ["10.0%", "100"]
    assert first.endswith("3.00 GiB of 2.00 GiB: does not fit")
    assert second.endswith("no such thing.")
    assert "forecast" in note


def test_a_search_makes_its_own_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3_8b_lora", "--search", "--what-if"]) == 2
    assert "--what-if is of one plan, and --search makes many" in capsys.readouterr().err

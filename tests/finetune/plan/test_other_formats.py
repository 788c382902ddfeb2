"""`plan --formats`, and the change that is named where a run does not fit: bytes that plans of them confirm."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thunder_memsave.budget import plan_request
from thunder_memsave.errors import BudgetError
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.plan.cheapest_change import Change, changes_that_should_fit
from thunder_memsave.finetune.plan.other_formats import (
    HeldBytes,
    Known,
    choices,
    forms_of,
    with_values,
)
from thunder_memsave.finetune.plan.plan_run import RunPlan, plan_run
from thunder_memsave.finetune.run.early_end import refused_budget
from thunder_memsave.finetune.run_file.batch_sizes import batch_sizes
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.planner.search.solve import solve

FULL = ("--lora=null", "--train.micro_batch_size=1", "--device=cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_request, "solve", partial(solve, time_limit_s=0.3))
    for name in ("_SMALLEST_S", "_CURVE_S"):
        monkeypatch.setattr(f"thunder_memsave.finetune.plan.run_planner.{name}", 0.01)


def planned(config: RunConfig, num_ranks: int, device: str = "h200") -> RunPlan:
    return plan_run(config, device=DEVICES[device], num_ranks=num_ranks, has_curve=False)


def test_what_each_sharding_holds_is_counted_for_one_run_after_the_other(run_file: str) -> None:
    held = HeldBytes("cuda")

    def of(sharding: str) -> int:
        config = load_run_config(run_file, [f"--strategy.sharding={sharding}"])
        return held.of(config, "bfloat16", num_ranks=4)

    whole, gathered, sharded = map(of, ("none", "zero2", "zero3"))
    assert sharded < whole / 2
    assert sharded < gathered < whole
    assert of("none") == whole


@pytest.mark.parametrize(
    "overrides", [pytest.param((), marks=pytest.mark.soak), ("--lora=null",)], ids=["lora", "full"]
)
def test_weights_and_states_take_what_plans_of_each_form_count(
    run_file: str, overrides: tuple[str, ...]
) -> None:
    config = load_run_config(run_file, overrides)
    known = Known.of_plan(planned(config, 1))
    found = choices(config, config, known)
    assert (found[0].num_ranks, found[0].form.values) == (1, {})
    assert found[0].peak_bytes == known.peak_bytes
    is_lora = not overrides
    assert [c.num_ranks for c in found[:4]] == [1, 2, 4, 8]
    assert {c.form.weights for c in found} == (
        {"bfloat16", "int8", "nf4"} if is_lora else {"float32", "bfloat16"}
    )
    # A plan takes seconds: each format of weights and of states, and each number of ranks, is in one of them.
    for number in (-2, 14) if is_lora else (2, -4):
        chosen = found[number]
        made = planned(with_values(config, chosen.form.values), chosen.num_ranks)
        by_kind = made.call.profile.peak_bytes_by_kind
        assert chosen.weight_bytes == by_kind["parameter"], chosen
        assert chosen.optimizer_bytes == by_kind["optimizer"], chosen


def test_mxfp4_is_a_form_of_a_run_that_has_experts(run_file: str) -> None:
    shape = {"model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    shape |= {
        "num_local_experts": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    values: dict[str, Any] = {"model.architecture": {**shape, "num_key_value_heads": 2}}
    values |= {"model.name_or_path": "org/a", "model.attn_implementation": "eager"}
    config = load_run_config(run_file)
    found = [
        {form.weights for form in forms_of(each)} for each in (config, with_values(config, values))
    ]
    assert found == [{"bfloat16", "int8", "nf4"}, {"bfloat16", "int8", "nf4", "mxfp4"}]


def test_a_run_in_fp8_has_its_frozen_weights_in_fp8_as_the_other_form(run_file: str) -> None:
    config = load_run_config(run_file, ["--fp8.recipe=current"])
    values = [f.values for f in forms_of(config) if "optimizer.states" not in f.values]
    assert values == [{}, {"fp8.frozen_weights": "fp8"}]


def test_formats_are_shown_for_up_to_eight_times_the_ranks(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "plan.json"
    options = ["--formats", "--world-size=2", f"--json={report}"]
    assert main(["plan", run_file, *options]) == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("weights and optimizer states on each rank") :].splitlines()
    assert table[1].split("  ")[0] == "weights"
    assert re.findall(r"(\d+) ranks", table[1]) == ["2", "4", "8", "16"]
    assert len(table) == 2 + 9
    formats = json.loads(report.read_text())["formats"]
    assert len(formats) == 36
    assert formats[0]["form"] == {"weights": "bfloat16", "states": "float32", "values": {}}


def refused(run_file: str, tmp_path: Path, *options: str) -> dict[str, Any]:
    report = tmp_path / "plan.json"
    assert main(["plan", run_file, f"--json={report}", *options]) == 3
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_a_run_that_does_not_fit_is_told_the_change_with_which_it_does(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smallest = planned(load_run_config(run_file, FULL[:2]), 1, "cpu").smallest_bytes
    budget = f"--budget={int(0.9 * smallest)}"
    change = refused(run_file, tmp_path, "--world-size=1", *FULL, budget)["change"]
    assert change == "--optimizer.states=bfloat16"
    assert f"with which it fits: {change}; planned so, it needs" in capsys.readouterr().out
    assert main(["plan", run_file, "--world-size=1", *FULL, budget, change]) == 0


def test_fewer_rows_at_once_come_first_because_no_number_changes(
    run_file: str, tmp_path: Path
) -> None:
    overrides = ("--train.micro_batch_size=4", "--train.global_batch_size=8")
    smallest = planned(load_run_config(run_file, overrides), 1, "cpu").smallest_bytes
    options = ("--world-size=1", "--device=cpu", *overrides, f"--budget={int(0.8 * smallest)}")
    assert refused(run_file, tmp_path, *options)["change"] == "--train.micro_batch_size=2"


def test_a_run_that_no_change_makes_fit_says_so(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(run_file, tmp_path, "--budget=70000", *FULL)["change"] is None
    assert "no change of rows per micro-batch, of formats or of" in capsys.readouterr().out


def estimated(config: RunConfig, num_ranks: int, part: float) -> list[Change]:
    known = Known(
        num_ranks=num_ranks,
        num_rows=2,
        device_type="cpu",
        budget_bytes=int(10_000_000 * part),
        peak_bytes=10_000_000,
    )
    return list(changes_that_should_fit(config, known))


def test_replicas_are_sharded_before_formats_change(run_file: str) -> None:
    config = load_run_config(run_file, ["--strategy.sharding=none", "--lora=null"])
    shown = [c.shown for c in estimated(config, 2, 0.999)]
    assert shown[:2] == ["--train.micro_batch_size=1", "--strategy.sharding=zero3"]
    assert "states" in shown[2]


def test_groups_of_ranks_that_are_larger_than_one_have_choices_too(run_file: str) -> None:
    config = load_run_config(run_file, ["--strategy.sharding={mode: hybrid, size: 2}"])
    known = Known(
        num_ranks=2,
        num_rows=2,
        device_type="cpu",
        budget_bytes=None,
        peak_bytes=10_000_000,
        by_kind={"gathered": 1_000_000},
    )
    found = choices(config, config, known)
    assert [c.num_ranks for c in found[:4]] == [2, 4, 8, 16]
    assert len({c.weight_bytes for c in found[:4]}) == 1  # replicas of the group
    assert found[0].peak_bytes == known.peak_bytes


def test_more_ranks_come_last_and_divide_the_batch(run_file: str) -> None:
    changes = estimated(load_run_config(run_file, ["--train.micro_batch_size=2"]), 2, 1.1)
    more = [c.num_ranks for c in changes if c.more_ranks]
    assert more
    assert set(more) == {4}  # 8 rows, 2 at once
    assert not any(c.more_ranks for c in changes[: -len(more)])


def test_the_error_of_a_run_names_the_change_that_should_fit(run_file: str) -> None:
    config = load_run_config(run_file, ["--train.micro_batch_size=2"])
    job: Any = SimpleNamespace(config=config, batch_sizes=batch_sizes(config.train, world_size=2))
    fabric: Any = SimpleNamespace(world_size=2, device=torch.device("cpu"))

    def told(budget_bytes: int) -> BudgetError:
        error = BudgetError.no_plan(
            budget_bytes=budget_bytes, smallest_bytes=10_000_000, bound_bytes=9_000_000
        )
        return refused_budget(error, fabric, job)

    found = told(9_000_000)
    assert "by estimate: --train.micro_batch_size=1, about " in str(found)
    assert str(found).endswith("; `thunder-memsave plan` shows it before the run.")
    assert found.smallest_bytes == 10_000_000
    assert "by estimate" not in str(told(1000))
    job.config = with_values(
        config, {"model.architecture": None}
    )  # of the hub, which a plan does not ask
    assert "by estimate" not in str(told(9_000_000))

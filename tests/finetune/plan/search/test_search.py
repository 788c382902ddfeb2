"""A search plans what may be faster and may fit, and nothing else; its table ranks what keeps the numbers first."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from thunder_memsave.errors import BudgetError, CaptureError, ThunderMemsaveError
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.plan import plan_command
from thunder_memsave.finetune.plan.other_formats import with_values
from thunder_memsave.finetune.plan.plan_run import plan_run
from thunder_memsave.finetune.plan.search import planning, search_command
from thunder_memsave.finetune.plan.search.asked import Asked, Judges
from thunder_memsave.finetune.plan.search.axes import Setting, settings_of
from thunder_memsave.finetune.plan.search.forecast import Forecast
from thunder_memsave.finetune.plan.search.options import SearchOptions, search_options
from thunder_memsave.finetune.plan.search.search import (
    MOST_ROWS,
    NUM_EXACT,
    Search,
    shown,
)
from thunder_memsave.finetune.plan.search.table import search_json, search_table
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.settings.problems import ConfigError

GIB = 2**30
ALL = search_options({"--search": "all"})
assert isinstance(ALL, SearchOptions)
DEFAULT = ALL.axes
_BITS = {"bfloat16": 16, "int8": 8, "mxfp4": 4, "nf4": 4}


@dataclass
class Machine:
    """Runs whose bytes and times are sums of simple terms."""

    config: RunConfig
    budget_bytes: int = 80 * GIB
    weights_bytes: int = 16 * GIB
    states_bytes: int = 4 * GIB
    """What of the weights' bytes is states, which may be on the host."""
    bytes_per_row: int = 10 * GIB
    planned: list[dict[str, Any]] = field(default_factory=list)
    refused: frozenset[str] = frozenset()
    undivided: frozenset[int] = frozenset()
    """Numbers of ranks that the weights cannot be divided into."""
    running: list[Asked] = field(default_factory=list)
    error: float = 1.0
    """By how much estimates are too fast."""
    exact: list[dict[str, Any]] = field(default_factory=list)
    """Those that were planned with all layers."""
    at_once: list[int] = field(default_factory=list)
    """How many plans were made beside each other when one was begun."""

    def held_bytes(self, setting: Setting) -> int:
        if setting.num_ranks in self.undivided:
            raise ConfigError("no groups of these.", key="strategy.sharding")
        shards = 1 if setting.sharding == "none" else setting.num_ranks
        weights = self.weights_bytes * _BITS.get(setting.form.weights, 16) // 16 // shards
        return weights - (self.states_bytes if setting.offload in ("optimizer", "all") else 0)

    def plan(self, values: Mapping[str, Any], setting: Setting) -> Forecast:
        self.planned.append({k: shown(v) for k, v in values.items()} | {"": setting.num_ranks})
        if setting.sharding in self.refused:
            raise BudgetError("no plan")
        rows = int(values.get("train.micro_batch_size", self.config.train.micro_batch_size or 1))
        held = self.held_bytes(setting)
        wanted, least = (
            held + rows * per_row for per_row in (self.bytes_per_row, self.bytes_per_row // 4)
        )
        fits = least <= self.budget_bytes
        recomputes = wanted > self.budget_bytes
        us_per_row = (1.3 if recomputes else 1.0) + 0.5 / rows
        return Forecast(
            fits=fits,
            peak_bytes=min(wanted, self.budget_bytes) if fits else least,
            budget_bytes=self.budget_bytes,
            constant_bytes=held,
            least_bytes=least,
            recompute_share=0.2 if recomputes else 0.0,
            recomputes_for_budget=recomputes,
            tokens_per_s=1e6 * setting.num_ranks / us_per_row,
        )

    def begin(self, asked: Asked) -> None:
        self.running.append(asked)
        self.at_once.append(len(self.running))

    def ended(self) -> tuple[Asked, Forecast | ThunderMemsaveError]:
        """End the plan that was begun last, as if it were the quickest."""
        asked = self.running.pop()
        if not asked.has_few_layers:
            self.exact.append({k: shown(v) for k, v in asked.values.items()})
        try:
            made = self.plan(asked.values, asked.setting)
            if not asked.has_few_layers:
                return asked, made
            speed = self.error * made.tokens_per_s
            return asked, replace(made, tokens_per_s=speed, is_estimate=True)
        except ThunderMemsaveError as error:
            return asked, error

    def search(self, *axes: str, num_ranks: tuple[int, ...] = (1,), **more: Any) -> Search:
        said: list[str] = []
        judges = Judges(
            begin=self.begin,
            ended=self.ended,
            held_bytes=self.held_bytes,
            budget_bytes=lambda setting: self.budget_bytes,
        )
        chosen = axes or DEFAULT
        found = Search(
            config=self.config, axes=chosen, in_all=32, judges=judges, say=said.append, **more
        )
        devices = [DEVICES["h100"]]
        found.run(settings_of(self.config, axes=chosen, num_ranks=num_ranks, devices=devices))
        assert len(said) == found.num_plans + found.num_estimates == len(self.planned)
        return found


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_command, "num_processes", lambda: 1)


@pytest.fixture
def config(run_file: str) -> RunConfig:
    batch = ["--train.global_batch_size=32", "--train.micro_batch_size=1"]
    # As the command searches: `auto` would try what other settings try.
    return load_run_config(run_file, [*batch, "--memory.offload=none"])


def test_rows_rise_while_they_fit_and_are_faster(config: RunConfig) -> None:
    machine = Machine(config)
    found = machine.search("micro_batch_size")
    tried = [each.get("train.micro_batch_size", "1") for each in machine.planned]
    assert tried == ["1", "2", "4", "8"]  # 8 recompute, and are slower: 16 are not tried
    best = found.ranked[0]
    assert best.change == "--train.micro_batch_size=4"
    assert best.forecast.recompute_share == 0.0


def test_settings_are_planned_together_with_the_same_result(config: RunConfig) -> None:
    one, three = Machine(config, bytes_per_row=90 * GIB), Machine(config, bytes_per_row=90 * GIB)
    alone = one.search("sharding", "frozen_weights", num_ranks=(4,))
    together = three.search("sharding", "frozen_weights", num_ranks=(4,), num_at_once=3)
    assert set(one.at_once) == {1}
    assert three.at_once[0] == 1  # what it finds tells about the others
    assert three.running == []
    assert max(three.at_once) == 3
    assert together.ranked[0] == alone.ranked[0]
    assert {row.change for row in together.found} >= {row.change for row in alone.found}


@pytest.mark.parametrize("num_at_once", [1, 3])
def test_the_first_rows_of_estimates_are_planned_exactly(
    config: RunConfig, num_at_once: int
) -> None:
    machine = Machine(config, bytes_per_row=20 * GIB, error=1.02)
    found = machine.search(
        "micro_batch_size", "frozen_weights", estimates=True, num_at_once=num_at_once
    )
    assert NUM_EXACT <= found.num_plans == len(machine.exact) < found.num_estimates
    first = found.ranked[:NUM_EXACT]
    assert not any(row.forecast.is_estimate for row in first)
    assert any(row.forecast.is_estimate for row in found.ranked)
    shown_table = search_table(found, num_tokens=None, price=None)
    assert f"{found.num_estimates} estimates and {found.num_plans} plans" in shown_table
    assert "~: estimated from 8 of the model's layers" in shown_table
    rows = search_json(found, num_tokens=None, price=None)["rows"]
    assert [r["is_estimate"] for r in rows] == [r.forecast.is_estimate for r in found.ranked]


def test_a_run_that_fits_by_estimate_alone_is_left_out(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(config, bytes_per_row=20 * GIB)
    plan, refused = machine.plan, {"train.micro_batch_size": "4"}

    def plan_or_refuse(values: Mapping[str, Any], setting: Setting) -> Forecast:
        made = plan(values, setting)
        if machine.exact and machine.exact[-1] == refused:
            return replace(made, fits=False, peak_bytes=90 * GIB)
        return made

    monkeypatch.setattr(machine, "plan", plan_or_refuse)
    found = machine.search("micro_batch_size", estimates=True)
    assert refused in machine.exact
    assert "--train.micro_batch_size=4" not in [row.change for row in found.found]
    assert found.left_out[-1].reason == "it needs 90.00 GiB at least"


def test_an_error_of_an_exact_plan_is_the_runs_or_a_reason(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(refused: Mapping[str, Any]) -> Search:
        machine = Machine(config, bytes_per_row=20 * GIB)
        plan = machine.plan

        def plan_or_raise(values: Mapping[str, Any], setting: Setting) -> Forecast:
            if machine.exact and values == refused:
                raise ConfigError("no such kernel.", key="model.dtype")
            return plan(values, setting)

        monkeypatch.setattr(machine, "plan", plan_or_raise)
        judges = Judges(
            begin=machine.begin,
            ended=machine.ended,
            held_bytes=machine.held_bytes,
            budget_bytes=lambda _: 80 * GIB,
        )
        axes = ("micro_batch_size",)
        found = Search(
            config=config, axes=axes, in_all=32, judges=judges, say=lambda _: None, estimates=True
        )
        devices = [DEVICES["h100"]]
        found.run(settings_of(config, axes=axes, num_ranks=(1,), devices=devices))
        return found

    assert "no such kernel" in search({"train.micro_batch_size": 4}).left_out[-1].reason
    with pytest.raises(ConfigError, match="no such kernel"):
        search({})


def test_rows_that_cannot_fit_are_not_planned(config: RunConfig) -> None:
    machine = Machine(config, bytes_per_row=160 * GIB)
    found = machine.search("micro_batch_size")
    assert [each.get("train.micro_batch_size", "1") for each in machine.planned] == ["1"]
    assert "estimated to need 96.00 GiB at least" in found.left_out[-1].reason


def test_a_run_that_does_not_fit_is_tried_with_fewer_rows(run_file: str) -> None:
    config = load_run_config(
        run_file, ["--train.global_batch_size=32", "--train.micro_batch_size=8"]
    )
    machine = Machine(config, bytes_per_row=60 * GIB)
    found = machine.search("micro_batch_size")
    assert [each.get("train.micro_batch_size", "8") for each in machine.planned] == ["8", "4"]
    assert [row.change for row in found.ranked] == ["--train.micro_batch_size=4"]


def test_weights_that_do_not_fit_alone_are_not_planned(config: RunConfig) -> None:
    machine = Machine(config, weights_bytes=100 * GIB)
    found = machine.search("frozen_weights")
    assert all("model.frozen_weights" in each for each in machine.planned)
    assert found.left_out[0].reason == ("weights and optimizer states take 100.00 GiB of 80.00 GiB")
    assert not any(row.keeps_numbers for row in found.ranked)
    table = search_table(found, num_tokens=None, price=None)
    assert "1*" in table
    assert "which changes the numbers" in table


def test_fewer_bits_and_more_shards_are_not_planned_where_nothing_is_recomputed(
    config: RunConfig,
) -> None:
    machine = Machine(config, bytes_per_row=GIB)
    found = machine.search("sharding", "frozen_weights", "states", num_ranks=(2,))
    assert len(machine.planned) == 1
    assert machine.planned[0]["strategy.sharding"] == "none"
    needless = ("it cannot be faster than ", "it holds only ")
    assert all(each.reason.startswith(needless) for each in found.left_out)


def test_what_others_work_with_says_what_cannot_fit(config: RunConfig) -> None:
    """Replicas of 60 GiB leave 20 of 80, and 4 shards work with 30 at least: the shards are planned, and first."""
    machine = Machine(config, weights_bytes=60 * GIB, bytes_per_row=120 * GIB)
    found = machine.search("sharding", num_ranks=(4,))
    assert machine.planned[0] == {"": 4}
    reasons = {each.change: each.reason for each in found.left_out}
    assert reasons["--strategy.sharding=none"] == "it is estimated to need 84.00 GiB at least"


def test_length_and_fp8_are_searched_where_they_are_named(config: RunConfig) -> None:
    """No bound of one length, or of other arithmetic, holds for another."""
    own = 256
    architecture = {**(config.model.architecture or {}), "max_position_embeddings": 2 * own}
    values = {"data.max_seq_length": own, "model.architecture": architecture}
    config = with_values(config, values)
    machine = Machine(config)
    found = machine.search("max_seq_length", "fp8")
    works = [dict(row.values) for row in found.ranked]
    lengths = [{}, {"data.max_seq_length": own // 2}, {"data.max_seq_length": 2 * own}]
    assert works[0] == {}
    expected = [{**fp8, **length} for fp8 in ({}, {"fp8.recipe": "delayed"}) for length in lengths]
    assert sorted(map(str, works)) == sorted(map(str, expected))
    assert [row.keeps_numbers for row in found.ranked] == [True] + 5 * [False]
    in_fp8 = with_values(config, {"fp8.recipe": "current"})
    assert in_fp8.fp8 is not None
    assert in_fp8.fp8.recipe == "current"
    assert not {"max_seq_length", "fp8"} & set(DEFAULT)


def test_what_saves_few_bytes_is_not_planned(config: RunConfig) -> None:
    machine = Machine(config, bytes_per_row=90 * GIB, states_bytes=GIB)
    found = machine.search("offload")
    offloads = [each.get("memory.offload") for each in machine.planned]
    assert set(offloads) == {None, "activations"}
    reasons = {each.reason for each in found.left_out}
    assert "it holds only 1.00 GiB less than the run as it is" in reasons


def test_fewer_bits_with_copies_are_planned_only_if_no_run_keeps_its_numbers(
    config: RunConfig,
) -> None:
    for weights_bytes, is_planned in ((60 * GIB, False), (100 * GIB, True)):
        machine = Machine(config, weights_bytes=weights_bytes, bytes_per_row=90 * GIB)
        machine.search("frozen_weights", "offload")
        with_both = [e for e in machine.planned if "memory.offload" in e and len(e) > 2]
        assert bool(with_both) == is_planned


def test_a_full_table_needs_no_plan_of_what_is_slower(config: RunConfig) -> None:
    """All rows recompute; those on fewer ranks would be slower even if they recomputed nothing."""
    machine = Machine(config, weights_bytes=40 * GIB, bytes_per_row=90 * GIB)
    found = machine.search("sharding", "offload", num_ranks=(2, 16))
    assert [row.num_ranks for row in found.ranked] == [16] * MOST_ROWS
    on_two = [each for each in machine.planned if each[""] == 2]
    assert len(on_two) <= 1  # the first of them says how fast they are
    reason = f"it cannot be among the first {MOST_ROWS}"
    assert any(each.reason == reason for each in found.left_out)


def test_what_keeps_the_numbers_is_ranked_first(config: RunConfig) -> None:
    machine = Machine(config, bytes_per_row=70 * GIB)  # nf4 leaves room for all, bfloat16 does not
    ranked = machine.search("frozen_weights").ranked
    assert [row.keeps_numbers for row in ranked] == sorted(
        (row.keeps_numbers for row in ranked), reverse=True
    )
    assert ranked[0].forecast.tokens_per_s < ranked[-1].forecast.tokens_per_s


def test_a_batch_that_ranks_do_not_divide_is_left_out_with_the_reason(config: RunConfig) -> None:
    found = Machine(config).search("sharding", num_ranks=(3, 4), shows_ranks=True)
    assert any("which is not a multiple of 3" in each.reason for each in found.left_out)
    assert {row.num_ranks for row in found.ranked} == {4}
    assert all("--world-size=4" in row.change for row in found.ranked)


def test_ranks_that_weights_are_not_divided_into_do_not_end_the_search(config: RunConfig) -> None:
    machine = Machine(config, weights_bytes=60 * GIB, undivided=frozenset({4}))
    found = machine.search("sharding", num_ranks=(2, 4), shows_ranks=True)
    assert found.ranked
    assert any(each.reason == "no groups of these." for each in found.left_out)


def test_a_change_that_is_refused_does_not_end_the_search(config: RunConfig) -> None:
    machine = Machine(config, bytes_per_row=200 * GIB, refused=frozenset({"none"}))
    found = machine.search("sharding", num_ranks=(2,))
    assert any(each.reason == "no plan" for each in found.left_out)
    assert found.ranked


def test_accumulation_keeps_the_global_batch(run_file: str) -> None:
    words = ["--train.global_batch_size=32", "--train.gradient_accumulation_steps=32"]
    machine = Machine(load_run_config(run_file, [*words, "--train.micro_batch_size=1"]))
    machine.search("micro_batch_size")
    for each in machine.planned[1:]:
        rows, steps = (
            int(each[f"train.{name}"])
            for name in ("micro_batch_size", "gradient_accumulation_steps")
        )
        assert rows * steps == 32


def test_hours_and_costs_are_of_all_ranks(config: RunConfig) -> None:
    found = Machine(config, bytes_per_row=GIB).search("offload", num_ranks=(4,))
    (row,) = search_json(found, num_tokens=3_600_000_000, price=2.0)["rows"][:1]
    hours = 1e6 / row["forecast_tokens_per_s"]
    assert row["forecast_hours"] == pytest.approx(hours)
    assert row["forecast_cost"] == pytest.approx(hours * 4 * 2.0)


def test_the_table_has_ten_rows_at_most_and_says_that_times_are_a_forecast(
    config: RunConfig,
) -> None:
    found = Machine(config, bytes_per_row=GIB).search(num_ranks=(1, 2, 4, 8), shows_ranks=True)
    assert len(found.found) > 10
    table = search_table(found, num_tokens=None, price=1.0)
    assert len([line for line in table.splitlines() if line[:1].isdigit()]) == 10
    assert "hours for 1M tokens" in table
    assert "cost of 1M tokens" in table
    assert "a forecast from rates that kernels sustain" in table


def test_nothing_may_fit(config: RunConfig) -> None:
    found = Machine(config, weights_bytes=900 * GIB).search("micro_batch_size")
    table = search_table(found, num_tokens=None, price=None)
    assert table.startswith("no run was found that fits, in 0 plans. The last that was tried:")


COMMAND = ["--search=micro_batch_size,sharding", "--device=cpu", "--world-size=2"]


def test_the_command_writes_a_run_file_that_is_read_back(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, found = tmp_path / "best.yaml", tmp_path / "found.json"
    words = [*COMMAND, f"--write={best}", f"--json={found}", "--train.epochs=2"]
    assert main(["plan", run_file, *words]) == 0
    out, err = capsys.readouterr()
    assert "what to run, the fastest first" in out
    assert f"the first is in {best}." in out
    assert "plan 1: " in err
    rows = json.loads(found.read_text())["rows"]
    before, after = (yaml.safe_load(Path(p).read_text()) for p in (run_file, best))
    assert after["lora"] == before["lora"]
    assert after["train"]["epochs"] == 2
    changed = load_run_config(best)
    assert f"--train.micro_batch_size={changed.train.micro_batch_size}" in rows[0]["change"]
    assert changed.train.global_batch_size == 8
    assert main(["plan", str(best), "--device=cpu", "--world-size=2"]) == 0


def test_other_processes_plan_what_this_one_does(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(config, axes=("sharding",), num_ranks=[2], devices=[DEVICES["h100"]])
    asked = [
        Asked(settings[0].values, settings[0]),
        Asked({"train.micro_batch_size": 3}, settings[0]),  # which 32 rows are no multiple of
    ]
    here, there = planning.Planning(config, 1), planning.Planning(config, 2)
    found = all_of(here, asked)
    assert [type(each) for each in found] == [Forecast, ConfigError]
    try:
        assert [str(each) for each in all_of(there, asked)] == [str(each) for each in found]
    finally:
        there.end()


def test_where_few_layers_cannot_be_planned_all_are(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (setting, *_) = settings_of(config, axes=(), num_ranks=[1], devices=[DEVICES["h100"]])
    tried: list[bool] = []

    def plan(*_: Any, has_few_layers: bool, **__: Any) -> Any:
        tried.append(has_few_layers)
        raise CaptureError("it reads the number of its layers.")

    monkeypatch.setattr(planning, "plan_run", plan)
    plans = planning.Planning(config, 1)
    asked = Asked({}, setting, has_few_layers=True)
    (found,) = all_of(plans, [asked])
    assert isinstance(found, CaptureError)
    assert tried == [True, False]


def all_of(
    plans: planning.Planning, asked: Sequence[Asked]
) -> list[Forecast | ThunderMemsaveError]:
    for each in asked:
        plans.begin(each)
    ended = [plans.ended() for _ in asked]
    return [answer for each in asked for of, answer in ended if of is each]


@pytest.mark.parametrize("begins", [True, False])
def test_plans_are_made_here_when_a_process_was_killed(
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    begins: bool,
) -> None:
    settings = settings_of(config, axes=("sharding",), num_ranks=[2], devices=[DEVICES["h100"]])
    asked = [Asked(settings[0].values, settings[0]), Asked({}, settings[0])]

    def submit(*_: object) -> Future[Any]:
        if not begins:
            raise BrokenProcessPool
        broken: Future[Any] = Future()
        broken.set_exception(BrokenProcessPool())
        return broken

    plans = planning.Planning(config, 2)
    monkeypatch.setattr(plans._pool, "submit", submit)
    monkeypatch.setattr(planning, "_planned", lambda _, each: each)
    found: Sequence[object] = all_of(plans, asked)
    assert found == asked
    assert "plans are made one after the other" in caplog.text


def test_ctrl_c_prints_the_table_so_far(
    run_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_first = iter([True, False])

    def plan(*args: Any, **kwargs: Any) -> Any:
        if not next(is_first):
            signal.raise_signal(signal.SIGINT)
        return plan_run(*args, **kwargs)

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(planning, "plan_run", plan)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        main(["plan", run_file, *COMMAND])
    assert ended.value.code == 130
    assert "what to run, the fastest first, of 2 plans" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--search=shardin"],
            "--search has 'shardin', which is no axis; did you mean 'sharding'?",
        ),
        (["--search=sharding,"], "in which a name is empty"),
        (["--price=2"], "--price is of a search, and has no effect without --search"),
        (["--search", "--price=free"], "--price is 'free'; write what one device costs"),
        (["--search", "--world-size=1,x"], "must be whole numbers of at least 1, such as 1,8"),
        (["--search", "--device=h100,h20"], "--device is 'h20', which is not known"),
        (["--search", "--longest"], "--longest is of one plan, and --search makes many"),
        (["--search", "--write=best.txt"], "a run file is YAML; name it best.yaml"),
        (["--search", "--write=no/where.yaml"], "there is no directory no; make it"),
    ],
)
def test_options_that_cannot_be_read_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        plan_command.parse_options(["run.yaml", *words])


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    path.write_text("a: 1\n")
    with pytest.raises(ConfigError, match="which exists and stays as it is; name a new file"):
        plan_command.parse_options(["run.yaml", "--search", f"--write={path}"])
    assert path.read_text() == "a: 1\n"


def test_the_next_word_is_an_override_and_no_axis() -> None:
    options, rest = plan_command.parse_options(["run.yaml", "--search", "train.epochs=2"])
    assert options.search is not None
    assert options.search.axes == DEFAULT
    assert rest == ["run.yaml", "train.epochs=2"]

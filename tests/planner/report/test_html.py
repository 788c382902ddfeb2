"""The report is one file without links, shows each kind of memory and each folded decision, and a browser draws it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from thunder_memsave.planner.actions import KEEP, RECOMPUTE, Actions
from thunder_memsave.planner.graph import Decision, Op, Plan, Program, Step, StepMemory, Storage
from thunder_memsave.planner.report.explain import explain, folded, kinds_table
from thunder_memsave.planner.report.html import Speed, write_report
from thunder_memsave.planner.report.timeline import timeline
from thunder_memsave.planner.simulate import Profile, simulate

MIB = 2**20
MEMORY = StepMemory(optimizer_bytes=3 * MIB, other_bytes=MIB)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def step(name: str, *, makes: tuple[int, ...], frees: tuple[int, ...] = ()) -> Step:
    op = Op(
        symbol=name,
        index=0,
        arguments=(),
        results=(name,),
        reads=(),
        makes=makes,
        peak_bytes=5 * MIB,
    )
    return Step(op=op, makes=makes, frees=frees)


@pytest.fixture
def program() -> Program:
    kinds = ("parameter", "activation", "activation", "temporary", "gradient")
    storages = tuple(
        Storage(nbytes=4 * MIB, kind=kind, name=f"s{i}")  # type: ignore[arg-type]
        for i, kind in enumerate(kinds)
    )
    steps = (
        step("linear", makes=(1,)),
        step("gelu", makes=(2,)),
        step("gelu_backward", makes=(3,), frees=(2,)),
        step("linear_backward", makes=(4,), frees=(1, 3)),
    )
    return Program(storages=storages, steps=steps, num_forward=2, held=frozenset({0}))


@pytest.fixture
def plan() -> Plan:
    layers = [
        Decision(
            name=f"t{i}",
            nbytes=MIB,
            cost_us=500.0,
            reason="cheap <again>",
            source="/home/me/model.py:12",
            module=f"model.layers.{i}.mlp",
        )
        for i in range(32)
    ]
    kept = Decision(
        name="t99",
        nbytes=7 * MIB,
        cost_us=9000.0,
        reason="dear",
        source="/home/me/model.py:99",
        module="model.head",
    )
    return Plan(
        actions=Actions({"t99": KEEP, **{layer.name: RECOMPUTE for layer in layers}}),
        budget_bytes=20 * MIB,
        predicted_peak_bytes=21 * MIB,
        keep_all_peak_bytes=40 * MIB,
        saved_bytes=7 * MIB,
        recompute_us=16000.0,
        lower_bound_us=15900.0,
        decisions=(kept, *layers),
    )


@pytest.fixture
def report(tmp_path: Path, plan: Plan, program: Program) -> Path:
    path = tmp_path / "plan.html"
    write_report(
        path,
        plan=plan,
        program=program,
        profile=simulate(program, MEMORY),
        memory=MEMORY,
        title="a model & its plan",
        curve=[(10 * MIB, 40000.0), (20 * MIB, 15900.0), (40 * MIB, 0.0)],
    )
    return path


def test_layers_that_are_the_same_are_one_row(plan: Plan) -> None:
    rows = folded(plan)
    assert [(row.action, row.count, row.nbytes, row.module) for row in rows] == [
        ("recompute", 32, 32 * MIB, "model.layers.*.mlp"),
        ("keep", 1, 7 * MIB, "model.head"),
    ]
    assert rows[0].cost_us == 32 * 500.0


def test_a_plan_is_explained_in_a_table(plan: Plan) -> None:
    text = explain(plan)
    assert re.search(r"^budget +20\.00 MiB$", text, re.MULTILINE)
    assert "decisions: keep 1, recompute 32" in text
    assert re.search(
        r"recompute  x32  32\.00 MiB  16\.00 ms  model\.layers\.\*\.mlp  me/model\.py:12", text
    )
    assert explain(plan, num_rows=1).endswith("... and 1 more rows")


def test_the_parts_of_the_peak_are_named_and_sum_to_it(program: Program) -> None:
    profile: Profile = simulate(program, MEMORY)
    table = kinds_table(profile)
    sizes = [float(size) for size in re.findall(r"([\d.]+) MiB", table)]
    assert sum(sizes[:-1]) == sizes[-1] == profile.peak_bytes / MIB
    assert "optimizer state" in table


def test_the_report_is_one_file_that_loads_nothing(report: Path) -> None:
    text = report.read_text()
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text)
    assert not re.search(r"url\((?!#)", text)
    assert not re.search(r"(?:fetch|import|XMLHttpRequest|WebSocket)\b", text)
    assert "a model &amp; its plan" in text
    assert "plan: does not fit" in text


def test_the_picture_has_the_peak_of_the_plan_and_names_its_bands(program: Program) -> None:
    profile = simulate(program, MEMORY)
    made = timeline(program, profile, MEMORY)
    totals = [sum(column) for column in zip(*made.bytes, strict=True)]
    assert max(totals) == totals[made.peak_point] == profile.peak_bytes
    assert [name for name, _ in made.phases if name != "loss"] == [
        "forward",
        "backward",
        "optimizer",
    ]
    assert made.kinds[:1] == ["weights"]
    assert made.ops[0] == "linear"


def test_the_largest_program_makes_a_small_file_that_keeps_its_peak(
    program: Program, plan: Plan, tmp_path: Path
) -> None:
    ops = [step(f"op{n}", makes=()) for n in range(20_000)]
    for n in range(0, len(ops), 2):
        module = f"model.layers.{n // 250}.self_attn.q_proj"
        ops[n] = replace(ops[n], op=replace(ops[n].op, module=module))
    ops[7777] = replace(ops[7777], op=replace(ops[7777].op, peak_bytes=99 * MIB))
    long = replace(program, steps=(*program.steps[:2], *ops, *program.steps[2:]), num_forward=9000)
    profile = simulate(long, MEMORY)
    made = timeline(long, profile, MEMORY)
    assert len(made.ops) < 1000
    assert sum(row[made.peak_point] for row in made.bytes) == profile.peak_bytes > 99 * MIB
    assert made.ops[made.peak_point] == "op7777"
    assert {"layers.0", "layers.35"} <= set(made.layers)
    many = [replace(plan.decisions[0], source=f"/a/b/model.py:{n}") for n in range(5000)]
    path = tmp_path / "plan.html"
    write_report(
        path,
        plan=replace(plan, decisions=tuple(many)),
        program=long,
        profile=profile,
        memory=MEMORY,
        title="x",
    )
    assert path.stat().st_size < 300_000
    assert "... and 4700 more rows" in path.read_text()


def test_the_speed_is_a_forecast_with_a_cost(program: Program, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    speed = Speed(micro_batch_ms=50.0, tokens=4096, num_devices=8, device="h100")
    profile = simulate(program, MEMORY)
    write_report(
        path, plan=plan, program=program, profile=profile, memory=MEMORY, title="x", speed=speed
    )
    text = path.read_text()
    assert speed.tokens_per_s == 81920.0
    assert "about 81,920 tokens/s on 8 devices of h100. No device has confirmed it" in text
    assert "price of a GPU hour" in text


def test_the_report_has_folded_decisions_with_their_lines(report: Path) -> None:
    text = report.read_text()
    assert "model.layers.*.mlp" in text
    assert ">x32<" in text
    assert "me/model.py:12" in text
    assert "cheap &lt;again&gt;" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_draws_the_report(report: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    picture = tmp_path / "report.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    subprocess.run(
        [CHROMIUM, *options, f"--screenshot={picture}", "--window-size=1200,1400", report.as_uri()],
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert picture.stat().st_size > 20_000

"""What `plan` says before a run is what `train` plans, but for the number of documents in its rows."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.forked_python import ForkedPython
from harness.language_model import run_values, write_run_file
from thunder_memsave.budget.offload import last_resort
from thunder_memsave.errors import DOES_NOT_FIT
from thunder_memsave.fabric.counted_step import CountedStep
from thunder_memsave.finetune.cli import main
from thunder_memsave.optim import on_host
from thunder_memsave.optim.on_host import Kind

TWICE = {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 1}
"""Two micro-batches accumulate."""
ONCE = {**TWICE, "global_batch_size": 2}
BUDGET = "--memory.budget=64MiB"
ON_HOST = {"offload": "optimizer", "host_budget": "1GiB"}
ENDS = 256
"""Most bytes of the ends of documents, of which packed rows may have more than a plan counts, which sees no data."""


def written(directory: Path, model: Path, **sections: Any) -> str:
    data = {"max_seq_length": 32, "packing": True}
    values = run_values(directory, model, **{"data": data, **sections})
    return str(write_run_file(directory, values))


def planned_bytes(file: str, directory: Path, *options: str) -> int:
    report = directory / "plan.json"
    assert main(["plan", file, "--device=cpu", f"--json={report}", BUDGET, *options]) == 0
    return int(json.loads(report.read_text())["predicted_peak_bytes"])


def trained_bytes(directory: Path) -> int:
    with (directory / "run" / "metrics.csv").open(encoding="utf-8") as rows:
        (found,) = {row["predicted_peak_bytes"] for row in csv.DictReader(rows)} - {""}
    return int(float(found))


@pytest.mark.parametrize(
    "sections",
    [
        {"train": ONCE, "lora": None},
        {"train": TWICE, "lora": None},
        {"train": TWICE},
        {"train": {**TWICE, "max_grad_norm": 1.0}, "lora": None, "memory": ON_HOST},
        {
            "train": {**ONCE, "max_grad_norm": None},
            "lora": None,
            "memory": {"optimizer_in_backward": True},
        },
    ],
    ids=["full", "full, accumulated", "lora, accumulated", "states on the host", "in backward"],
)
def test_on_one_rank(sections: dict[str, Any], one_layer: Path, tmp_path: Path) -> None:
    file = written(tmp_path, one_layer, **sections)
    found = planned_bytes(file, tmp_path, "--world-size=1")
    assert main(["train", file, BUDGET]) == 0
    assert 0 <= trained_bytes(tmp_path) - found <= ENDS


@pytest.mark.parametrize("sharding", [pytest.param("zero2", marks=pytest.mark.soak), "zero3"])
def test_on_two_ranks(sharding: str, one_layer: Path, tmp_path: Path) -> None:
    train = {**TWICE, "micro_batch_size": 1}
    file = written(tmp_path, one_layer, train=train, lora=None, strategy={"sharding": sharding})
    found = planned_bytes(file, tmp_path, "--world-size=2")
    process = ForkedPython(
        ["-m", "thunder_memsave", "train", file, BUDGET, "--devices=2"],
        num_children=1,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    error = process.communicate()[1]
    assert process.returncode == 0, error
    assert 0 <= trained_bytes(tmp_path) - found <= ENDS


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_peak_of_the_update_names_what_lowers_it(
    is_asked: bool, one_layer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"global_batch_size": 1, "micro_batch_size": 1, "max_steps": 1, "max_grad_norm": None}
    memory = {"optimizer_in_backward": is_asked}
    data = {"max_seq_length": 4}
    # Which holds a copy of all weights, and more.
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "foreach": True}}
    sections = {"train": train, "lora": None, "memory": memory, "data": data}
    file = written(tmp_path, one_layer, optimizer=optimizer, **sections)
    asked = ["plan", file, "--device=cpu", "--memory.budget=1KiB"]
    assert main(asked) == DOES_NOT_FIT
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "does not fit:" in each)
    assert ("which fewer tokens do not lower" in line) is not is_asked
    assert ("memory.optimizer_in_backward, which frees " in line) is not is_asked
    assert ("A smaller train.micro_batch_size" in line) is is_asked


@pytest.mark.parametrize("in_backward", [False, True])
def test_states_that_go_to_the_host_where_nothing_fits_without(
    in_backward: bool, one_layer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_host, "PIECE_BYTES", 50_000)
    train = {**ONCE, "max_grad_norm": None} if in_backward else {**TWICE, "max_grad_norm": 1.0}
    memory = {"optimizer_in_backward": in_backward}
    file = written(tmp_path, one_layer, train=train, lora=None, memory=memory)
    report = tmp_path / "smallest.json"
    asked = ["plan", file, "--device=cpu", f"--json={report}", "--memory.budget=1KiB"]
    assert main(asked) == DOES_NOT_FIT
    smallest_bytes = json.loads(report.read_text())["smallest_budget_bytes"]
    less = f"--memory.budget={smallest_bytes - 1}"
    monkeypatch.setattr(last_resort, "is_host", lambda _: False)
    auto = ["--memory.offload=auto", "--memory.host_budget=1GiB", less]
    found = planned_bytes(file, tmp_path, "--world-size=1", *auto)
    on_its_host = json.loads((tmp_path / "plan.json").read_text())["optimizer_bytes_on_host"]
    moved: list[int] = []
    move = CountedStep._move_states

    def noted(self: CountedStep, kinds: Sequence[Kind]) -> None:
        move(self, kinds)
        moved.append(self.memory(True).host_bytes)

    monkeypatch.setattr(CountedStep, "_move_states", noted)
    assert main(["train", file, *auto]) == 0
    # A part of the states leaves room, in which plans differ for batches that do by the ends of documents; in backward
    # so do the microseconds that copies wait, by which one part is faster than another.
    assert max(found, trained_bytes(tmp_path)) < smallest_bytes
    assert on_its_host > 0
    if in_backward:
        assert min(moved) > 0
    else:
        assert moved == [on_its_host]


@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["unclipped", "clipped"])
def test_weights_are_updated_in_backward_where_nothing_fits_without(
    max_norm: float | None, one_layer: Path, tmp_path: Path
) -> None:
    train = {**ONCE, "max_grad_norm": max_norm}
    file = written(tmp_path, one_layer, train=train, lora=None, data={"max_seq_length": 4})
    report = tmp_path / "smallest.json"
    asked = ["plan", file, "--device=cpu", "--world-size=1", f"--json={report}"]
    without = "--memory.optimizer_in_backward=false"
    assert main([*asked, "--memory.budget=1KiB", without]) == DOES_NOT_FIT
    less = f"--memory.budget={json.loads(report.read_text())['smallest_budget_bytes'] - 1}"
    if max_norm is not None:
        assert main([*asked, less]) == DOES_NOT_FIT
        return
    found = planned_bytes(file, tmp_path, "--world-size=1", less)
    assert json.loads((tmp_path / "plan.json").read_text())["updates_in_backward"]
    assert main(["train", file, less]) == 0
    assert 0 <= trained_bytes(tmp_path) - found <= ENDS

from __future__ import annotations

import csv
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str, num_processes: int, directory: Path) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    command = [*(launch if num_processes > 1 else []), str(EXAMPLES / name), *arguments]
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=directory, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_another_number_of_ranks_gets_the_rest_of_the_epoch_each_row_once() -> None:
    example = load_example("resume_mid_epoch.py")
    before, seen = example.ResumableBatches(rank=0, world_size=1), []
    for batch, _ in zip(before, range(2), strict=False):
        seen += batch
        before.advance()
    ranks = [example.ResumableBatches(rank=rank, world_size=4) for rank in range(4)]
    for after in ranks:
        after.load_state_dict(before.state_dict())
        for batch in after:
            seen += batch
            after.advance()
    assert sorted(seen) == [(0, row) for row in range(example.NUM_ROWS)]
    assert {(after.epoch, after.batch) for after in ranks} == {(1, 0)}


# Python 3.12 warns of the fork that makes a data-loader worker.
@pytest.mark.filterwarnings("ignore:.*use of fork.* may lead to deadlocks:DeprecationWarning")
def test_a_loop_with_workers_goes_on_in_the_middle_of_an_epoch_bit_by_bit(tmp_path: Path) -> None:
    example = load_example("resume_mid_epoch.py")
    whole = example.main([f"--output-dir={tmp_path}/whole"])
    for stop in (3, 5, 9):  # in an epoch, at its end, and in a later one
        torch.manual_seed(stop)
        assert example.main([f"--output-dir={tmp_path}/parts", f"--stop-after={stop}"]) != whole
    assert example.main([f"--output-dir={tmp_path}/parts"]) == whole


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_minimal_script_trains(num_processes: int, tmp_path: Path) -> None:
    output = run_example("fabric_minimal.py", num_processes=num_processes, directory=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]


def test_the_minimal_script_is_30_lines_without_an_import_of_ours() -> None:
    text = (EXAMPLES / "fabric_minimal.py").read_text()
    assert "import thunder_memsave" not in text
    assert "from thunder_memsave" not in text
    code = text.split('"""')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30


def test_the_pre_training_loop_learns_and_leaves_metrics_and_a_checkpoint(tmp_path: Path) -> None:
    output = run_example(
        "pretrain.py", "--num-steps=40", "--output-dir=out", num_processes=1, directory=tmp_path
    )
    assert "everything is in out" in output
    with (tmp_path / "out" / "metrics.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 40
    assert losses[-1] < 0.75 * losses[0]
    assert (tmp_path / "out" / "checkpoints" / "step-00000040").is_dir()

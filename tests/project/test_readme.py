"""What the README shows is what runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from thunder_memsave.finetune.run_file.reading.parse import load_run_config

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_fabric_example_trains_on_two_processes_and_saves(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(blocks("python")[0])
    result = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[1]) for line in re.findall(r"^\d+ \S+$", result.stdout, re.M)]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoint").exists()


def test_the_example_is_short() -> None:
    assert len(blocks("python")[0].splitlines()) < 40


def test_the_yaml_example_is_a_valid_run_file(tmp_path: Path) -> None:
    (example,) = blocks("yaml")
    path = tmp_path / "run.yaml"
    path.write_text(example)
    config = load_run_config(path, [])
    assert config.lora is not None
    assert config.lora["r"] == 16

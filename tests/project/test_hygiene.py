"""The suite's own fixtures catch a test that leaves something behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

LEAKING_TESTS = """
import multiprocessing, os, threading, time
import torch

def test_environment():
    os.environ["LEAKED_NAME"] = "1"

def test_environment_is_restored():
    assert "LEAKED_NAME" not in os.environ

def test_dtype():
    torch.set_default_dtype(torch.float64)

def test_dtype_is_restored():
    assert torch.get_default_dtype() == torch.float32

def test_process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )

def test_process_group_is_destroyed():
    assert not torch.distributed.is_initialized()

def test_thread():
    threading.Thread(target=time.sleep, args=(2,), name="leaked-thread").start()

def test_process():
    multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,)).start()

def test_files_land_outside_the_checkout(tmp_path):
    assert os.getcwd() == str(tmp_path)
"""


def test_leaks_fail_the_test_that_made_them(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_leaks.py").write_text(LEAKING_TESTS)
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
    output = subprocess.run(
        [*command, tmp_path], capture_output=True, text=True, check=False, env=environment
    ).stdout
    assert "9 passed, 5 errors" in output, output
    assert "leaves environment variables changed: ['LEAKED_NAME']" in output
    assert "default_dtype=torch.float64" in output
    assert "process_group=True" in output
    assert "leaves threads running: ['leaked-thread']" in output
    assert "leaves processes running" in output

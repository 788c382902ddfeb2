"""Training is the same under every launcher: torchrun, two of its nodes, SLURM, and Fabric's own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from harness.fabric import finish, free_port, run_python, start_python
from thunder_memsave.config import ConfigError

TORCHRUN = ("-m", "torch.distributed.run")

SCRIPT = """
import json
import os
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

devices, num_nodes, result = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


def train(fabric):
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    rows = data[fabric.global_rank :: fabric.world_size]
    losses = []
    for _ in range(3):
        loss = model(rows).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    node_rank, local_rank = fabric.node_rank, fabric.local_rank
    fact = {"losses": losses, "world_size": fabric.world_size, "place": [node_rank, local_rank]}
    (result / f"{fabric.global_rank}.json").write_text(json.dumps(fact))


fabric = Fabric(
    strategy="thunder_memsave", accelerator="cpu", devices=devices, num_nodes=num_nodes
)
train(fabric) if "LT_CLI_USED" in os.environ else fabric.launch(train)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results"
    path.mkdir()
    return path


def expected_losses() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_results(results: Path, *, places: list[list[int]]) -> None:
    for rank, place in enumerate(places):
        fact = json.loads((results / f"{rank}.json").read_text())
        assert fact["world_size"] == len(places)
        assert fact["place"] == place
        assert fact["losses"] == pytest.approx(expected_losses(), rel=1e-5)
        assert not math.isclose(fact["losses"][0], fact["losses"][-1], rel_tol=1e-2)


def test_torchrun(script: Path, results: Path) -> None:
    workers = ("--nproc-per-node", 2, "--master-port", free_port())
    run_python([*TORCHRUN, *workers, script, 2, 1, results])
    check_results(results, places=[[0, 0], [0, 1]])


def test_two_nodes_of_torchrun(script: Path, results: Path) -> None:
    agents = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port())
    nodes = [
        start_python([*TORCHRUN, *agents, "--node-rank", node, script, 1, 2, results], num_forks=2)
        for node in range(2)
    ]
    for node in nodes:
        finish(node)
    check_results(results, places=[[0, 0], [1, 0]])


def slurm(task: int, port: int) -> dict[str, str]:
    """Return the environment of a task under `srun --nodes=2 --ntasks-per-node=1`."""
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_PROCID": str(task),
        "SLURM_NODEID": str(task),
        "SLURM_LOCALID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_slurm(script: Path, results: Path) -> None:
    port = free_port()
    tasks = [
        start_python([script, 1, 2, results], num_forks=1, **slurm(task, port)) for task in range(2)
    ]
    for task in tasks:
        finish(task)
    check_results(results, places=[[0, 0], [1, 0]])


def test_devices_that_contradict_slurm_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**slurm(0, free_port()), "SLURM_NTASKS": "8"}.items():
        monkeypatch.setenv(name, value)
    fabric = Fabric(strategy="thunder_memsave", accelerator="cpu", devices=1, num_nodes=2)
    with pytest.raises(ConfigError, match="asks for 2 processes, but SLURMEnvironment started 8"):
        fabric.launch()


def test_fabrics_own_launcher(script: Path, results: Path) -> None:
    run_python([script, 2, 1, results], num_forks=2, MASTER_PORT=str(free_port()))
    check_results(results, places=[[0, 0], [0, 1]])


def test_fabrics_command(script: Path, results: Path) -> None:
    options = ("--accelerator=cpu", "--strategy=thunder_memsave", "--devices=2")
    port = f"--main-port={free_port()}"
    command = ["-m", "lightning.fabric.cli", *options, port]
    run_python([*command, script, 2, 1, results], num_forks=3)
    check_results(results, places=[[0, 0], [0, 1]])


def test_one_process(script: Path, results: Path) -> None:
    run_python([script, 1, 1, results], num_forks=1)
    check_results(results, places=[[0, 0]])


def test_devices_that_contradict_torchrun_are_an_error(script: Path, results: Path) -> None:
    workers = ("--nproc-per-node", 2, "--master-port", free_port())
    with pytest.raises(AssertionError) as failure:
        run_python([*TORCHRUN, *workers, script, 1, 1, results], num_forks=3)
    message = (
        "Fabric(devices=1, num_nodes=1) asks for 1 processes, but TorchElasticEnvironment started 2"
    )
    assert message in str(failure.value)

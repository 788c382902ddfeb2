"""A run whose processes, agents and machines are killed ends with the weights of an undisturbed run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from harness.fabric import free_port, run_python
from harness.nodes import Cluster, in_namespaces, kill, on_loopback, why_no_namespaces

SCRIPT = """
import os
import sys
import time
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.callbacks.checkpoint import (
    ModelCheckpoint, list_checkpoints, read_info
)
from thunder_memsave.callbacks.verified import load_checkpoint

run, devices, num_nodes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
gates = set(sys.argv[4:])


def pass_gate(place, step):
    gate = run / f"{place}-{step}"
    if gate.name not in gates or os.environ["NODE"] == "a":
        return
    arrived = gate.with_suffix(".new")
    arrived.write_text(str(os.getpid()))
    arrived.replace(gate)
    while not gate.with_suffix(".open").exists():
        time.sleep(0.01)


strategy = ThunderMemsaveStrategy(sharding="zero3", timeout="60s")
fabric = Fabric(strategy=strategy, accelerator="cpu", devices=devices, num_nodes=num_nodes)
fabric.launch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
torch.manual_seed(fabric.global_rank)
state = {"model": model, "optimizer": optimizer, "step": 0}
checkpoints = list_checkpoints(run)
if checkpoints:
    load_checkpoint(fabric, read_info(checkpoints[-1]), state)
print("goes on from step", state["step"], flush=True)
saves = ModelCheckpoint(run, every_n_steps=1)
for step in range(state["step"] + 1, 6):
    loss = model(torch.randn(3, 6)).square().mean()
    fabric.backward(loss)
    pass_gate("backward", step)
    optimizer.step()
    optimizer.zero_grad()
    pass_gate("step", step)
    state["step"] = step
    saves.on_train_batch_end(fabric=fabric, step=step, state=state)
    pass_gate("save", step)
torch.save([p.data.clone() for p in model.parameters()], run / f"final-{fabric.global_rank}.pt")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def make_directory(path: Path) -> Path:
    path.mkdir()
    return path


def uninterrupted(script: Path, directory: Path) -> Path:
    workers = ("--nproc-per-node", 2, "--master-port", free_port())
    launch = ["-m", "torch.distributed.run", *workers]
    run_python([*launch, script, directory, 2, 1], num_forks=3, NODE="a")
    return directory


class Run:
    """Two agents that train together, the second of which is disturbed at gates."""

    def __init__(self, cluster: Cluster, arguments: list[object]) -> None:
        self.cluster, self.arguments = cluster, arguments
        self.directory = cluster.logs
        self.agents = [cluster.start(number, arguments) for number in range(2)]
        self.workers: set[int] = set()

    def worker_at(self, gate: str, *, other_than: int | None = None) -> int:
        """Return the process of the second machine that waits at a gate."""
        path, noted = self.directory / gate, str(other_than)
        self.cluster.wait_until(
            lambda: path.exists() and path.read_text() != noted, f"a process at {gate}"
        )
        self.workers.add(int(path.read_text()))
        return int(path.read_text())

    def open(self, gate: str) -> None:
        (self.directory / f"{gate}.open").touch()

    def kill_agent(self) -> None:
        kill(self.agents[1].pid)
        self.agents[1].wait()

    def restart_agent(self) -> None:
        self.agents[1] = self.cluster.start(1, self.arguments)

    def wait(self) -> None:
        self.cluster.wait_until(lambda: all(a.poll() is not None for a in self.agents), "the end")
        logs = [self.cluster.log(number).read_text()[-6000:] for number in range(2)]
        assert [a.returncode for a in self.agents] == [0, 0], logs


@contextmanager
def running(cluster: Cluster, arguments: list[object]) -> Iterator[Run]:
    run = Run(cluster, arguments)
    try:
        yield run
    finally:
        for agent in run.agents:
            end(agent)
        for worker in run.workers:
            if str(arguments[0]) in command_of(worker):
                kill(worker)


def command_of(pid: int) -> str:
    """Return a process's command line: its number may belong to another process by now."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text() if path.exists() else ""


def end(agent: subprocess.Popen[bytes]) -> None:
    """Let an agent stop its processes; a test that passed has none left."""
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(timeout=40)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


MACHINE_DIES = ("backward-2", "step-3", "save-4")
PROCESS_DIES = "backward-5"
AGENT_DIES = ("backward-2", "step-3", "backward-4")
"""Gates before the step is saved, so that the process which takes over comes here again."""


def check_restarts(
    cluster: Cluster, script: Path, expected: Path, *, process_dies: bool = False
) -> None:
    gates = (*MACHINE_DIES, *([PROCESS_DIES] if process_dies else []))
    with running(cluster, [script, cluster.logs, 1, 2, *gates]) as run:
        for gate in MACHINE_DIES:
            kill_machine(run, gate)
        if process_dies:
            kill_process(run, PROCESS_DIES)
        run.wait()
    check_same_weights(cluster.logs, expected)
    starts = cluster.log(0).read_text().count("goes on from step")
    assert starts == 1 + len(gates), "each death restarts the other machine's process once"


def check_same_weights(directory: Path, expected: Path) -> None:
    for rank in range(2):
        ours, theirs = (torch.load(d / f"final-{rank}.pt") for d in (directory, expected))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def kill_process(run: Run, gate: str) -> None:
    """The agent notices, and restarts the process; so does the other machine's."""
    worker = run.worker_at(gate)
    kill(worker)
    run.worker_at(gate, other_than=worker)
    run.open(gate)


def kill_machine(run: Run, gate: str) -> None:
    """Its agent counts restarts from 0 again, while the other machine's counts on."""
    worker = run.worker_at(gate)
    run.kill_agent()
    kill(worker)
    run.open(gate)
    run.restart_agent()


def kill_agent_alone(run: Run, gate: str) -> None:
    """Its process goes on until the other machine's agent notices the new one."""
    orphan = run.worker_at(gate)
    run.kill_agent()
    run.restart_agent()
    run.worker_at(gate, other_than=orphan)
    run.open(gate)


@pytest.mark.soak
def test_a_run_survives_three_deaths_of_an_agent_and_its_process(
    script: Path, tmp_path: Path
) -> None:
    expected = uninterrupted(script, make_directory(tmp_path / "expected"))
    network = on_loopback if why_no_namespaces() else in_namespaces
    with network(make_directory(tmp_path / "run"), "static") as cluster:
        check_restarts(cluster, script, expected)


@pytest.mark.soak
def test_a_run_survives_the_death_of_a_process_alone(script: Path, tmp_path: Path) -> None:
    expected = uninterrupted(script, make_directory(tmp_path / "expected"))
    with on_loopback(make_directory(tmp_path / "run"), "static") as cluster:
        check_restarts(cluster, script, expected, process_dies=True)


@pytest.mark.soak
def test_an_elastic_run_takes_an_agent_back_whose_process_lives_on(
    script: Path, tmp_path: Path
) -> None:
    expected = uninterrupted(script, make_directory(tmp_path / "expected"))
    with on_loopback(make_directory(tmp_path / "run"), "c10d") as cluster:
        with running(cluster, [script, cluster.logs, 1, 2, *AGENT_DIES]) as run:
            for gate in AGENT_DIES:
                kill_agent_alone(run, gate)
            run.wait()
        check_same_weights(cluster.logs, expected)

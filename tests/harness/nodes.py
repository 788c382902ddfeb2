"""Two machines of one run: torchrun agents in network namespaces of their own, or both on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.fabric import free_port

Rendezvous = Literal["static", "c10d"]

_HANG_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine, on which processes can run."""

    name: str
    address: str
    interface: str
    inside: tuple[str, ...] = ()
    """Prefix that runs a command on this machine."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Two machines, the first of which serves the rendezvous."""

    rendezvous: Rendezvous
    """`c10d`: an agent can come back; `static`: agents do not know of each other."""
    nodes: tuple[Node, Node]
    port: int
    logs: Path

    def start(
        self, number: int, arguments: Sequence[object], **env: str
    ) -> subprocess.Popen[bytes]:
        """Start torchrun on a machine; append its output to the machine's log file."""
        node = self.nodes[number]
        command = [*node.inside, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", "1", "--max-restarts", "4", "--monitor-interval", "0.1"]
        command += self._rendezvous(number)
        with self.log(number).open("ab") as log:
            return subprocess.Popen(
                [*command, *map(str, arguments)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": node.interface,
                    "NODE": node.name,
                    "OMP_NUM_THREADS": "1",
                    # A restarted agent waits in vain for the address of a store that agents share.
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    **env,
                },
            )

    def _rendezvous(self, number: int) -> list[str]:
        node, host = self.nodes[number], self.nodes[0]
        if self.rendezvous == "static":
            address = ["--master-addr", host.address, "--master-port", str(self.port)]
            return [*address, "--node-rank", str(number)]
        # The agent that was killed is forgotten after five seconds, where torchrun waits fifteen.
        alive = "keep_alive_interval=1,keep_alive_max_attempt=5"
        where = ["--local-addr", node.address, "--rdzv-endpoint", f"{host.address}:{self.port}"]
        conf = ["--rdzv-id", "run", "--rdzv-conf", f"is_host={number == 0},{alive}"]
        return ["--rdzv-backend", "c10d", *where, *conf]

    def log(self, number: int) -> Path:
        """Return the output of a machine's processes."""
        return self.logs / f"{self.nodes[number].name}.log"

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Return when the condition holds.

        Raises:
            AssertionError: it does not become true; with the end of what the machines printed.
        """
        deadline = time.monotonic() + _HANG_S
        while not condition():
            if time.monotonic() > deadline:
                ends = [self.log(n).read_text(errors="replace")[-6000:] for n in range(2)]
                raise AssertionError(f"waited {_HANG_S} s for {what}:\n" + "\n=====\n".join(ends))
            time.sleep(0.02)


def why_no_namespaces() -> str | None:
    """Return the reason that network namespaces cannot be made here; None if they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    name = f"zero3-{os.getpid()}"
    made = _ip("netns", "add", name)
    if made.returncode:
        return f"`ip netns add` is not allowed: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def on_loopback(logs: Path, rendezvous: Rendezvous) -> Iterator[Cluster]:
    """Make a cluster whose machines are both this one."""
    nodes = tuple(Node(name=name, address="127.0.0.1", interface="lo") for name in "ab")
    pair = (nodes[0], nodes[1])
    yield Cluster(rendezvous=rendezvous, nodes=pair, port=free_port(), logs=logs)


@contextmanager
def in_namespaces(logs: Path, rendezvous: Rendezvous) -> Iterator[Cluster]:
    """Make a cluster whose machines have networks of their own, and one cable between them."""
    spaces = [f"zero3-{os.getpid()}-{name}" for name in "ab"]
    try:
        for space in spaces:
            _must("netns", "add", space)
        cable = [f"veth{os.getpid() % 10**6}{name}" for name in "ab"]
        _must(
            "link",
            "add",
            cable[0],
            "netns",
            spaces[0],
            "type",
            "veth",
            "peer",
            "name",
            cable[1],
            "netns",
            spaces[1],
        )
        nodes = []
        for name, space, end, last in zip("ab", spaces, cable, (1, 2), strict=True):
            address = f"10.231.77.{last}"
            _must("-n", space, "addr", "add", f"{address}/24", "dev", end)
            _must("-n", space, "link", "set", end, "up")
            _must("-n", space, "link", "set", "lo", "up")
            inside = ("ip", "netns", "exec", space)
            nodes.append(Node(name=name, address=address, interface=end, inside=inside))
        pair = (nodes[0], nodes[1])
        yield Cluster(rendezvous=rendezvous, nodes=pair, port=29500, logs=logs)
    finally:
        for space in spaces:
            _ip("netns", "del", space)


def kill(pid: int) -> None:
    """End a process with SIGKILL, if it still runs."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)


def _must(*arguments: str) -> None:
    done = _ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"

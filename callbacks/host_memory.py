"""How much memory of this machine is free for this process, limits of its container included."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes(*, meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """The smaller of what the machine and what the container has left; None where neither can be known.

    Args:
        meminfo: Linux's table, of which `MemAvailable` is read.
        cgroup: The container's directory (cgroup v2), with `memory.max` and `memory.current`.
    """
    known = [free for free in (_of_machine(meminfo), _of_container(cgroup)) if free is not None]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_container(cgroup: Path) -> int | None:
    limits, used = _lines(cgroup / "memory.max"), _lines(cgroup / "memory.current")
    if not limits or not used or limits[0] == "max":
        return None
    # Pages of files that were read count as used, and are given back when they are needed.
    statistics = dict(line.split() for line in _lines(cgroup / "memory.stat"))
    cached = int(statistics.get("inactive_file", 0))
    return max(int(limits[0]) - int(used[0]) + cached, 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # another system, or no container

"""Measures the free memory of this machine for this process, with the limits of its container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 2**62
"""cgroup v1 writes the largest number of whole pages to mean no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """Names of the files of one cgroup version."""

    limit: str
    used: str
    cached: str
    """A line of `memory.stat`: bytes of the page cache that count as used, and are freed when needed."""


_V1 = _Files(
    limit="memory.limit_in_bytes", used="memory.usage_in_bytes", cached="total_inactive_file"
)
_V2 = _Files(limit="memory.max", used="memory.current", cached="inactive_file")


def free_host_bytes(
    *, meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own_cgroups: Path = _OWN_CGROUPS
) -> int | None:
    """Return the smallest free memory of the machine and of the cgroups that contain this process.

    A limit may come from a container, a batch system's job, or a service. Cgroups are nested, and each one's
    limit counts.

    Args:
        meminfo: Linux's table, of which `MemAvailable` is read.
        cgroup: Mount point of the cgroups; those of cgroup v1 are in `memory`.
        own_cgroups: Linux's list of the cgroups of this process.

    Returns:
        Bytes; None if nothing is known.
    """
    known = [_of_machine(meminfo)]
    known += [_of_group(directory, _V2) for directory in _own(own_cgroups, cgroup, "")]
    known += [_of_group(path, _V1) for path in _own(own_cgroups, cgroup / "memory", "memory")]
    return min((free for free in known if free is not None), default=None)


def _of_machine(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _own(own_cgroups: Path, root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup and those around it up to the root; a path may lead outside of what we see.

    Lines are `4:memory:/a/b` in cgroup v1 and `0::/a/b` in v2.
    """
    parts: list[str] = []
    for line in _lines(own_cgroups):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            parts = [part for part in PurePosixPath(path).parts[1:] if part != ".."]
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:depth])


def _of_group(directory: Path, files: _Files) -> int | None:
    limits, used = _lines(directory / files.limit), _lines(directory / files.used)
    if not limits or not used or limits[0] == "max" or int(limits[0]) >= _NO_LIMIT_BYTES:
        return None
    statistics = dict(line.split() for line in _lines(directory / "memory.stat"))
    cached = int(statistics.get(files.cached, 0))
    return max(int(limits[0]) - int(used[0]) + cached, 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # another system, or no container

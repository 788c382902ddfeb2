"""Pytest plugin of `make soak`: resumes where the last run ended, and prints a table with a row per goal."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

LINES = {
    "kills": "100 random kill -9 of a rank under torchrun, at least 30 mid-save: 0 committed steps lost, "
    "final weights bit-identical to the uninterrupted run",
    "kill points": "a kill at each named point of a save x rank x sync/async: 0 checkpoints lost",
    "flips": "1000 single-byte flips and 50 truncations over every file: 0 loaded silently",
    "hostile checkpoints": "50 hostile checkpoints: 0 code run, 0 files read or written outside",
    "bad configs": "200 bad configs: 0 tracebacks, 0 accepted",
    "reshard": "w -> w' for all w, w' in 1, 2, 3, 4, zero2 and zero3, odd dims, tied, frozen, fp8: model and "
    "optimizer bit-equal",
    "streamed data": "kill -9 of all processes at random, on 2, 1 and 2 ranks, then to the end on 3: every row of a "
    "streamed file once per epoch along the history of the last weights",
    "stop": "SIGTERM 20 of 20 saved and left in time",
    "full disks": "a disk that is full at every write of a save: 0 old checkpoints lost",
    "nan": "NaN injected on one rank: 0 updates applied on any",
    "resume": "bit-exact from every step of a 20-step run: AdamW and SGD, fp32, bf16, fp8 and nvfp4, dropout, "
    "accumulation, LoRA",
    "export": "an exported adapter and a merged model give the same logits in plain transformers (fp32: 1e-6)",
    "all combinations": "what the suite covers in pairs, in every combination, and other long tests",
}
"""Goal by argument of `pytest.mark.line`; the last one is for soak tests without that mark."""

MEASURED = "measured"
"""Name of the property that a test records to have a number of its own in the table."""

_STATE = Path(".soak") / "results.json"
_READ_BY_TESTS = ("strategy", "callbacks", "configs", "tests", "pyproject.toml", "constraints.txt")
_CHANGED = (
    f"A file in {', '.join(_READ_BY_TESTS)} was changed while the tests ran. Tests that ended since are not counted, "
    "and no table is saved; run it again, and leave the files as they are meanwhile (a clone of their own keeps them)."
)
_PACKAGES = ("torch", "lightning", "lightning-thunder", "transformers", "peft")

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one test."""

    outcome: Outcome
    seconds: float
    measured: str
    """The test's own number; for a skipped test its reason."""


@dataclass(kw_only=True, slots=True)
class Soak:
    """The known results for the code as it is now."""

    path: Path
    digest: str
    """Hash, at the start, of all files that a result may depend on."""
    commit: str
    """The commit at the start, marked if files differ from it."""
    line_of: dict[str, str] = field(default_factory=dict)
    """Name of the goal by test id, for all tests that exist."""
    results: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path, *, is_fresh: bool) -> Soak:
        """Read the results of an earlier `make soak`, unless a file has changed since."""
        soak = cls(path=root / _STATE, digest=_digest(root), commit=_commit(root))
        if is_fresh or not soak.path.exists():
            return soak
        written = json.loads(soak.path.read_text())
        if written["digest"] == soak.digest:
            soak.line_of = written["line_of"]
            soak.results = {test: Result(**r) for test, r in written["results"].items()}
        return soak

    def write(self) -> None:
        """Write the results to disk atomically: this process may be killed."""
        self.path.parent.mkdir(exist_ok=True)
        results = {test: dataclasses.asdict(result) for test, result in self.results.items()}
        content = {"digest": self.digest, "line_of": self.line_of, "results": results}
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, self.path)

    def is_done(self, test: str) -> bool:
        """Tell whether a test has passed, so that it need not run again."""
        return test in self.results and self.results[test].outcome == "passed"

    def rows(self) -> list[Row]:
        """Return a row for each goal."""
        return [self._row(line) for line in LINES]

    def _row(self, line: str) -> Row:
        tests = [test for test, its in self.line_of.items() if its == line]
        known = [self.results[test] for test in tests if test in self.results]
        return Row(
            line=line,
            goal=LINES[line],
            num_tests=len(tests),
            num_passed=sum(result.outcome == "passed" for result in known),
            failed=[test for test in tests if self._outcome(test) == "failed"],
            measured=list(dict.fromkeys(result.measured for result in known if result.measured)),
            seconds=round(sum(result.seconds for result in known), 1),
        )

    def _outcome(self, test: str) -> Outcome | None:
        return self.results[test].outcome if test in self.results else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    line: str
    goal: str
    num_tests: int
    num_passed: int
    failed: list[str]
    measured: list[str]
    seconds: float

    @property
    def result(self) -> str:
        """Tell whether the goal is reached, with the tests' own numbers."""
        if not self.num_tests:
            return "no test"
        reached = "reached" if self.num_passed == self.num_tests else "NOT reached"
        if self.failed:
            reached = "FAILED"
        return "; ".join(
            [f"{reached}: {self.num_passed} of {self.num_tests} tests", *self.measured]
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make soak`."""
    group = parser.getgroup("soak")
    group.addoption("--soak-fresh", action="store_true", help="forget what was run before")
    group.addoption(
        "--soak-save", metavar="DIR", help="write the table there, with date and versions"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record this run of pytest."""
    is_fresh = bool(config.getoption("--soak-fresh"))
    config.pluginmanager.register(_Session(config, Soak.read(config.rootpath, is_fresh=is_fresh)))


class _Session:
    """Records how each test ends."""

    def __init__(self, config: pytest.Config, soak: Soak) -> None:
        self.config, self.soak = config, soak
        self.reports: list[pytest.TestReport] = []
        self.is_changed = False
        """True if a file has changed since the start, so that later results hold for neither version."""

    @pytest.hookimpl(tryfirst=True)  # before -m and -k choose
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            line = _line_of(item)
            if line is not None:
                self.soak.line_of[item.nodeid] = line
        done = [item for item in items if self.soak.is_done(item.nodeid)]
        self.config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if not self.soak.is_done(item.nodeid)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)
        if report.when == "teardown":
            self._note_change()
            if not self.is_changed:
                self.soak.results[report.nodeid] = _result(self.reports)
                self.soak.write()
            self.reports = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._note_change()
        if self.is_changed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in _as_text(self.soak.rows()):
            terminalreporter.write_line(line)
        directory = self.config.getoption("--soak-save")
        if self.is_changed:
            terminalreporter.write_line(_CHANGED)
        elif directory:
            for path in _save(self.soak, self.config.rootpath, Path(directory)):
                terminalreporter.write_line(f"written: {path}")

    def _note_change(self) -> None:
        self.is_changed = self.is_changed or _digest(self.config.rootpath) != self.soak.digest


def _line_of(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("line")
    if mark is None:
        return "all combinations" if item.get_closest_marker("soak") else None
    if mark.args and mark.args[0] in LINES:
        return str(mark.args[0])
    raise pytest.UsageError(
        f"{item.nodeid} has pytest.mark.line{mark.args!r}, which is no line of the table; name one of "
        f"{', '.join(map(repr, LINES))} (tests/harness/soak.py)."
    )


def _result(reports: Sequence[pytest.TestReport]) -> Result:
    outcomes = {report.outcome for report in reports}
    outcome: Outcome = "failed" if "failed" in outcomes else "passed"
    measured = [str(value) for key, value in reports[-1].user_properties if key == MEASURED]
    if outcome == "passed" and "skipped" in outcomes:
        outcome = "skipped"
        reasons = [r.longrepr[2] for r in reports if isinstance(r.longrepr, tuple)]
        measured = [reason.removeprefix("Skipped: ") for reason in reasons]
    seconds = sum(report.duration for report in reports)
    return Result(outcome=outcome, seconds=seconds, measured="; ".join(measured))


def _as_text(rows: Iterable[Row]) -> Iterator[str]:
    yield ""
    for row in rows:
        yield f"{row.line:<20} {row.seconds:>8.1f} s  {row.result}"
        yield f"{'':<20} {'':>8}    goal: {row.goal}"
        yield from (f"{'':<20} {'':>8}    failed: {test}" for test in row.failed)


def _save(soak: Soak, root: Path, directory: Path) -> list[Path]:
    rows = soak.rows()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = {
        "command": "make soak SAVE=1",
        "date": today,
        "commit": soak.commit,
        "machine": f"{os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **_versions()},
    }
    table = [{**dataclasses.asdict(row), "result": row.result} for row in rows]
    stem = root / directory / f"soak_{today}_cpu"
    paths = [stem.with_suffix(".json"), stem.with_suffix(".md")]
    paths[0].write_text(json.dumps({**about, "lines": table}, indent=1) + "\n")
    paths[1].write_text("\n".join(_as_markdown(rows, about)) + "\n")
    return paths


def _as_markdown(rows: Iterable[Row], about: Mapping[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    yield f"# Soak of {about['date']}"
    yield ""
    yield f"`{about['command']}` at {about['commit']} on {about['machine']}; {versions}."
    yield ""
    yield "| line | goal | result | seconds |"
    yield "|---|---|---|--:|"
    for row in rows:
        yield f"| {row.line} | {row.goal} | {row.result} | {row.seconds:,.1f} |"


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in _PACKAGES}


def _commit(root: Path) -> str:
    """Return the commit, marked as dirty if files differ from it."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "no commit"


def _digest(root: Path) -> str:
    digest = hashlib.sha256(f"{platform.python_version()} {_versions()}".encode())
    for path in sorted(_files(root)):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    for name in _READ_BY_TESTS:
        path = root / name
        if path.is_file():
            yield path
        yield from (p for p in path.rglob("*") if p.suffix in (".py", ".yaml") and p.is_file())

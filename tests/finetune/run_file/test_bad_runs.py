"""Every file of `bad_runs/` is refused with the messages that its header names, and nothing is left.

The first lines of a file are `# args:` (overrides of the command), `# problems:` (how many there
are) and, for each of them, `# expect:` with its line of the report. A line that ends in `...` is a
start: what follows is another library's, or long. HERE is the directory of the run. A run sees the
model `model`, the good rows `rows.jsonl`, and the bad data files of `bad_runs/data` as `data`.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.forked_python import ForkedPython
from harness.language_model import prompt_rows, write_jsonl
from thunder_memsave.finetune.cli import main

BAD_RUNS = Path(__file__).parent / "bad_runs"
CASES = sorted(path.stem for path in BAD_RUNS.glob("*.yaml"))


@pytest.fixture
def workplace(tmp_path: Path, model_directory: Path) -> Path:
    """Make the directory in which the commands run."""
    (tmp_path / "model").symlink_to(model_directory)
    (tmp_path / "data").symlink_to(BAD_RUNS / "data")
    write_jsonl(tmp_path / "rows.jsonl", prompt_rows(8))
    return tmp_path


def headers(case: str, name: str) -> list[str]:
    start = f"# {name}: "
    lines = (BAD_RUNS / f"{case}.yaml").read_text(encoding="utf-8").splitlines()
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def arguments_of(case: str) -> list[str]:
    return shlex.split(" ".join(headers(case, "args")))


def is_as_expected(line: str, expected: str) -> bool:
    return line.startswith(expected[:-3]) if expected.endswith("...") else line == expected


def check_report(report: str, case: str) -> None:
    (num_problems,) = headers(case, "problems")
    noun = "problem" if num_problems == "1" else "problems"
    assert report.startswith(f"error: run.yaml cannot be used; {num_problems} {noun}:\n"), report
    lines = report.splitlines()[1:]
    expected = headers(case, "expect")
    assert len(lines) == len(expected) == int(num_problems), report
    for line, wanted in zip(lines, expected, strict=True):
        line = line.removeprefix("  ").replace(str(Path.cwd()), "HERE")
        assert is_as_expected(line, wanted), f"{wanted}\n\n{report}"
    assert "Traceback" not in report


@pytest.mark.parametrize("case", CASES)
def test_a_bad_run_is_refused_with_places_and_leaves_nothing(
    case: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copyfile(BAD_RUNS / f"{case}.yaml", workplace / "run.yaml")
    before = sorted(workplace.iterdir())
    assert main(["train", "run.yaml", *arguments_of(case)]) == 2
    captured = capsys.readouterr()
    check_report(captured.err, case)
    assert captured.out == ""
    assert main(["validate", "run.yaml", *arguments_of(case)]) == 2
    assert capsys.readouterr() == captured
    assert sorted(workplace.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "run.yaml: the run file is empty; `thunder-memsave configs list` names some to"),
        (b"\x89PNG\r\n\x1a\n", "run.yaml: run.yaml is not a text in UTF-8 (byte 0 is 0x89); is it"),
        (b"output_dir: \xe9", "run.yaml is not a text in UTF-8 (byte 12 is 0xe9)"),
        (b"output_dir: a\x00b", "run.yaml:1: this is not YAML"),
        (None, "run.yaml: run.yaml is a directory; name the YAML file itself."),
    ],
)
def test_a_file_that_is_no_run_file_is_refused(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    assert main(["train", "run.yaml"]) == 2
    report = capsys.readouterr().err
    assert report.startswith("error: run.yaml cannot be used; 1 problem:\n")
    assert message in report


def test_the_corpus_is_large_and_every_file_of_data_is_used() -> None:
    assert len(CASES) >= 60
    texts = "".join((BAD_RUNS / f"{case}.yaml").read_text(encoding="utf-8") for case in CASES)
    assert [file.name for file in (BAD_RUNS / "data").iterdir() if file.name not in texts] == []


def test_under_torchrun_a_report_is_printed_once(workplace: Path) -> None:
    case = "wrong_types_everywhere"
    shutil.copyfile(BAD_RUNS / f"{case}.yaml", workplace / "run.yaml")
    before = sorted(workplace.iterdir())
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "thunder_memsave", "train", "run.yaml"]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = ForkedPython(command, num_children=2, cwd=workplace, **streams)
    error = process.communicate()[1]
    assert process.returncode == 1
    assert error.count("error: run.yaml cannot be used; 7 problems:") == 1
    for expected in headers(case, "expect"):
        assert error.count(expected.removesuffix("...")) == 1, error
    assert error.count("Traceback (most recent call last)") == 1  # torchrun's own
    assert sorted(workplace.iterdir()) == before

"""Out of device memory: one message, the key to change, and an exit code of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from harness.language_model import run_values, write_run_file
from thunder_memsave.config import MemoryConfig
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.run.out_of_memory import changes, write_snapshot
from thunder_memsave.finetune.run_file.batch_sizes import batch_sizes
from thunder_memsave.finetune.run_file.config import TrainConfig
from thunder_memsave.settings.schema import parse_section
from thunder_memsave.strategy import ThunderMemsaveStrategy

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 MiB is "
    "free. Of the allocated memory 76.00 GiB is allocated by PyTorch."
)
ERROR = torch.OutOfMemoryError(MESSAGE)


TOTAL = 80 * 2**30 + 5
AVAILABLE = 79 * 2**30


def planned(*, peak_bytes: int, **memory: Any) -> ThunderMemsaveStrategy:
    config = parse_section(MemoryConfig, memory, where="memory")
    return cast(
        ThunderMemsaveStrategy,
        SimpleNamespace(
            plan=SimpleNamespace(predicted_peak_bytes=peak_bytes),
            config=SimpleNamespace(memory=config),
            available_bytes=AVAILABLE,
            budget_bytes=config.budget_bytes(TOTAL, available_bytes=AVAILABLE),
        ),
    )


def rows(num_rows: int, *, steps: int | None = None) -> dict[str, Any]:
    """Return the sizes of a run with so many rows at once, and so many micro-batches if its file says so."""
    train = TrainConfig(
        micro_batch_size=num_rows, gradient_accumulation_steps=steps, global_batch_size=144
    )
    return {"sizes": batch_sizes(train, world_size=1), "train": train}


def test_the_budget_is_lowered_by_what_is_missing_or_the_micro_batch_is_divided() -> None:
    strategy = planned(budget="70GiB", peak_bytes=69 * 2**30)
    assert changes(ERROR, strategy, **rows(4)) == (
        f"--memory.budget={int(67.5 * 1024)}MiB",
        "--train.micro_batch_size=2",
    )
    assert changes(ERROR, strategy, **rows(9))[1] == "--train.micro_batch_size=3"
    assert changes(ERROR, strategy, **rows(1)) == ("--memory.budget=69120MiB",)
    assert changes(ERROR, strategy, **rows(9, steps=16))[1] == (
        "--train.micro_batch_size=3 --train.gradient_accumulation_steps=48"
    )
    without = cast(ThunderMemsaveStrategy, SimpleNamespace(plan=None))
    assert changes(ERROR, without, **rows(1)) == ()


def test_a_reserve_that_is_given_grows_instead_of_the_budget() -> None:
    """A budget beside a reserve is refused, so the reserve grows and gives the plan the same limit."""

    def budget_bytes(**memory: str) -> int:
        config = parse_section(MemoryConfig, memory, where="memory")
        found = config.budget_bytes(TOTAL, available_bytes=AVAILABLE)
        assert found is not None
        return found

    strategy = planned(peak_bytes=80 * 2**30, reserve="4GiB")
    (change,) = changes(ERROR, strategy, **rows(1))
    name, _, value = change.partition("=")
    assert name == "--memory.reserve"
    # The missing bytes, and less than a MiB from rounding.
    assert 0 <= AVAILABLE - 4 * 2**30 - 3 * 2**29 - budget_bytes(reserve=value) < 2 * 2**20
    default = planned(peak_bytes=80 * 2**30)
    (change,) = changes(ERROR, default, **rows(1))
    name, _, value = change.partition("=")
    assert name == "--memory.budget"
    assert budget_bytes(budget=value) < budget_bytes()


def test_there_is_no_snapshot_where_torch_has_no_allocator_of_its_own(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        path = write_snapshot(tmp_path, rank=3)
        assert path == tmp_path / "out_of_memory-rank3.pickle"
    else:
        assert write_snapshot(tmp_path, rank=0) is None


class OutOfMemory:
    """A callback that runs out of device memory."""

    def on_train_batch_end(self, *, step: int) -> None:
        if step == 2:
            raise torch.OutOfMemoryError(MESSAGE)


def test_a_run_out_of_memory_ends_with_one_message_that_says_what_to_change(
    tmp_path: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values: dict[str, Any] = run_values(
        tmp_path,
        model_directory,
        train={"max_steps": 4, "micro_batch_size": 2},
        memory={"budget": "2GiB"},
    )
    del values["data"]["dataset"]["init_args"]["val_fraction"]
    monkeypatch.setattr(
        "thunder_memsave.finetune.run.train.PlanShown", lambda *_, **options: OutOfMemory()
    )
    assert main(["train", str(write_run_file(tmp_path, values))]) == 4
    error = capsys.readouterr().err
    (line,) = error.splitlines()
    assert line.startswith("error: at step 2, CUDA out of memory; the plan predicts a peak of ")
    advice = line.partition("To go on, make one change: ")[2]
    assert advice.startswith("--train.micro_batch_size=1. "), "the plan needs less than is missing"
    assert line.endswith("config.yaml --train.micro_batch_size=1 --resume=auto")

"""A run on streamed data that is killed at any moment goes on on other processes, and sees each row once an epoch."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from harness.distributed import SOAK_HANG_S
from harness.fabric import finish, start_python
from harness.language_model import prompt_rows, run_values, write_jsonl, write_model, write_run_file
from harness.seen_rows import seen_rows
from thunder_memsave.finetune.data.packing import Rows
from thunder_memsave.finetune.data.prepare import prepare_data
from thunder_memsave.finetune.run_file.reading.parse import read_run_file

NUM_ROWS, NUM_EPOCHS, GLOBAL_BATCH = 400, 3, 6
SECONDS_FOR_A_START = 300  # on a busy machine
MOST_STEPS = 12
"""Most steps of a start before its kill."""
STEP_S = 0.2


def write_run(directory: Path) -> Path:
    values = run_values(
        directory,
        write_model(directory / "model", num_hidden_layers=1),
        train={"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 1, "epochs": NUM_EPOCHS},
        checkpoint={"every_n_steps": 2, "keep_last": 2},
        callbacks=[{"class_path": "harness.seen_rows.SeenRows", "init_args": {"directory": ""}}],
    )
    del values["train"]["max_steps"]
    path = write_jsonl(directory / "rows.jsonl", prompt_rows(NUM_ROWS))
    arguments = {"path": str(path), "streaming": True}
    values["data"]["dataset"] = {"class_path": "DataFiles", "init_args": arguments}
    values["data"]["packing"] = True
    return write_run_file(directory, values)


def all_rows(run_file: Path) -> list[str]:
    """Return the hash of each row, as `SeenRows` writes it."""
    config = read_run_file(run_file, []).config
    tokenizer = AutoTokenizer.from_pretrained(config.model.name_or_path)
    rows = prepare_data(config, tokenizer).train
    return [_hash_of(rows, row) for row in range(len(rows))]


def _hash_of(rows: Rows, row: int) -> str:
    batch = rows.lay_out([row])
    content = batch.input_ids[0].numpy().tobytes() + batch.targets[0].numpy().tobytes()
    return sha256(content).hexdigest()[:16]


def life(run_file: Path, seen: Path, num_processes: int, chance: random.Random | None) -> None:
    """Run to the end; or, with a chance, until all processes get SIGKILL at a moment that it draws."""
    values = yaml.safe_load(run_file.read_text())
    values["callbacks"][0]["init_args"]["directory"] = str(seen)
    path = run_file.with_name("start.yaml")
    path.write_text(yaml.safe_dump(values))
    command = ["train", path, f"--devices={num_processes}", "--resume=auto"]
    # No forks: all processes of the start are in its session, and die with it.
    process = start_python(["-m", "thunder_memsave", *command])
    if chance is None:
        finish(process, timeout=SECONDS_FOR_A_START)
        return
    num_steps = chance.randrange(1, MOST_STEPS)
    end = time.monotonic() + SECONDS_FOR_A_START
    while not (seen.exists() and len(seen_rows(seen)) >= num_steps) and process.poll() is None:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    time.sleep(chance.uniform(0, STEP_S))
    is_running = process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    assert is_running, output
    assert len(seen_rows(seen)) >= num_steps, output


@pytest.mark.soak
@pytest.mark.line("streamed data")
@pytest.mark.timeout(SOAK_HANG_S)
def test_every_row_is_seen_once_per_epoch_through_kills_on_2_1_and_3_ranks(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seed = int(os.environ.get("KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"KILL_SEED={seed}")
    chance = random.Random(seed)
    run_file = write_run(tmp_path)
    history: dict[int, list[str]] = {}
    num_again = 0
    # On 2 ranks, then on 1, on 2 again, and on 3 to the end.
    for number, num_processes in enumerate((2, 1, 2, 3)):
        seen = tmp_path / f"seen {number}"
        is_last = number == 3
        life(run_file, seen, num_processes, None if is_last else chance)
        of_this = seen_rows(seen)
        # The last start that took a step is the one whose weights went on.
        num_again += len(history.keys() & of_this.keys())
        history |= of_this
    expected = all_rows(run_file)
    per_epoch = -(-len(expected) // GLOBAL_BATCH)
    assert sorted(history) == list(range(1, NUM_EPOCHS * per_epoch + 1))
    for epoch in range(NUM_EPOCHS):
        steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        counted = Counter(row for step in steps for row in history[step])
        assert counted == Counter(expected), f"epoch {epoch}"
    shutil.rmtree(tmp_path / "run")
    record_property(
        "measured",
        f"{len(expected)} rows, {NUM_EPOCHS} epochs, 3 kills: each row once per epoch, {num_again} steps taken again",
    )

"""A load refuses a checkpoint in which any byte was changed or cut off."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.fabric import Fabric

from harness.fabric import make_fabric
from harness.run_checkpoints import make_state, save, weight_of
from thunder_memsave.callbacks.checkpoint import CheckpointInfo, read_info
from thunder_memsave.callbacks.verified import load_checkpoint
from thunder_memsave.checkpoints.manifest import DamagedCheckpointError


def all_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def is_refused(fabric: Fabric, path: Path) -> bool:
    """Tell whether a load, or `read_info`, with which a run begins, refuses it."""
    state = make_state(fabric, 0.0, step=0)
    try:
        info = CheckpointInfo(path=path, world_size=1, values={})
        load_checkpoint(fabric, info, state)
    except DamagedCheckpointError:
        return weight_of(state) == 0.0 and state["step"] == 0
    return False


def flip(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def loaded_silently(directory: Path, *, num_flips: int, num_cuts: int, seed: int) -> list[str]:
    fabric, chance = make_fabric(), random.Random(seed)
    path = save(fabric, directory, step=3)
    files = all_files(path)
    assert len(files) == 6, files
    silent = []
    for number in range(num_flips + num_cuts):
        file = files[number % len(files)]  # each file, also the smallest
        content = file.read_bytes()
        file.write_bytes((flip if number < num_flips else cut)(content, chance))
        if not is_refused(fabric, path):
            silent.append(f"{file.name}, number {number} of seed {seed}")
        file.write_bytes(content)
    state = make_state(fabric, 0.0, step=0)
    load_checkpoint(fabric, read_info(path), state)
    assert (weight_of(state), state["step"]) == (3.0, 3)
    return silent


def test_no_flipped_bit_and_no_missing_end_is_loaded(tmp_path: Path) -> None:
    assert loaded_silently(tmp_path, num_flips=90, num_cuts=18, seed=0) == []


@pytest.mark.soak
@pytest.mark.line("flips")
def test_a_thousand_flips_and_fifty_truncations_are_all_refused(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    silent = loaded_silently(tmp_path, num_flips=1000, num_cuts=50, seed=seed)
    record_property("measured", f"1050 damaged files of seed {seed}, {len(silent)} loaded")
    assert silent == []


def test_a_file_of_another_step_is_refused(tmp_path: Path) -> None:
    fabric = make_fabric()
    first, second = save(fabric, tmp_path, step=1), save(fabric, tmp_path, step=2)
    for file in all_files(first):
        other = second / file.relative_to(first)
        if file.read_bytes() != other.read_bytes():
            content = other.read_bytes()
            shutil.copy(file, other)
            assert is_refused(fabric, second), file
            other.write_bytes(content)

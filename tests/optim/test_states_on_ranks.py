"""States in fewer bits have the same bits on any number of ranks, and in any checkpoint of theirs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch
import torch.distributed as dist

from harness.distributed import SOAK_HANG_S, run_on_ranks
from harness.odd_model import StatesName, assert_same, fresh, train, trained
from thunder_memsave.checkpoints import load_checkpoint, save_checkpoint
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.local_state import keep_state_whole
from thunder_memsave.sharding.sharded_parameter import StateRows

WIDTH = 300
"""Elements of rows: a block of 256, and a shorter one."""

Format = Literal["sharded", "full"]
STATES: tuple[StatesName, ...] = get_args(StatesName)


def groups(num_ranks: int) -> list[DataParallel | None]:
    """Make the groups of the first 1, 2, ... ranks; None is a process alone. A collective."""
    timeout = timedelta(seconds=120)
    made = [dist.new_group(list(range(size)), timeout=timeout) for size in range(2, num_ranks + 1)]
    return [None, *(DataParallel(mode="zero3", group=group) for group in made)]


def check_all(rank: int, root: Path, pairs: list[tuple[StatesName, Format]]) -> None:
    """Train alike on each number of ranks, save, load on each other number, and train on."""
    layouts = groups(dist.get_world_size())
    num_loads = 0
    for number, (states, format) in enumerate(pairs):
        half, whole = (trained(steps=n, name=states, width=WIDTH) for n in (3, 5))
        for source, dp in enumerate(layouts):
            if rank <= source:
                net, used = trained(dp, name=states, width=WIDTH)
                assert_same(net, used, half, dp)
                state = {"model": net, "optimizer": used}
                path = root / f"{number} {source}"
                save_checkpoint(path, state, state_dict_type=format, data_parallel=dp)
            dist.barrier()
            for target, other in enumerate(layouts):
                if rank <= target:
                    net, used = fresh(other, name=states, width=WIDTH)
                    state = {"model": net, "optimizer": used}
                    load_checkpoint(root / f"{number} {source}", state, data_parallel=other)
                    assert_same(net, used, half, other)
                    train(net, used, range(3, 5), other)
                    assert_same(net, used, whole, other)
                    num_loads += 1
    if rank == 0:
        (root / "num_loads").write_text(str(num_loads))


def check_by_hand(rank: int) -> None:
    """Gather the values of `state_dict()` and load them, as scripts do without our checkpoints."""
    dp = groups(dist.get_world_size())[-1]
    half, whole = (trained(steps=n, name="int8", width=WIDTH) for n in (3, 5))
    _, used = trained(dp, name="int8", width=WIDTH)
    other, loaded = trained(dp, name="int8", width=WIDTH)
    for optimizer in (used, loaded):
        keep_state_whole(optimizer)
    gathered = used.state_dict()
    for values in gathered["state"].values():
        for key, value in values.items():
            values[key] = value.full_tensor() if isinstance(value, StateRows) else value
    for number, values in half[1].state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(gathered["state"][number][key], value), (number, key)
    for state in (gathered, used.state_dict()):
        loaded.load_state_dict(state)
        assert_same(other, loaded, half, dp)
    train(other, loaded, range(3, 5), dp)
    assert_same(other, loaded, whole, dp)


def test_scripts_gather_states_and_load_wholes_or_rows(tmp_path: Path) -> None:
    run_on_ranks(check_by_hand, 2, tmp_path / "rendezvous")


def test_states_have_the_bits_of_one_rank_and_go_on_from_any_checkpoint(tmp_path: Path) -> None:
    """Of 1, 2 and 3 ranks: among them 2 to 1, and 1 to 3."""
    pairs = [("int8", "sharded"), ("fp8", "full")]
    run_on_ranks(check_all, 3, tmp_path / "rendezvous", tmp_path, pairs)
    assert (tmp_path / "num_loads").read_text() == "18"


@pytest.mark.soak
@pytest.mark.line("reshard")
@pytest.mark.timeout(SOAK_HANG_S)
def test_all_states_in_all_formats_on_up_to_four_ranks(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    pairs = [(states, format) for states in STATES for format in get_args(Format)]
    run_on_ranks(check_all, 4, tmp_path / "rendezvous", tmp_path, pairs, hang_s=SOAK_HANG_S)
    assert (tmp_path / "num_loads").read_text() == "96"

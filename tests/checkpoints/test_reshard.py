"""A checkpoint of any number of ranks and any sharding loads bit-exactly on any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch.distributed as dist
from torch.optim import Optimizer

from harness.distributed import SOAK_HANG_S, run_on_ranks
from harness.odd_model import Net, OptimizerName, assert_same, fresh, train, trained
from thunder_memsave.checkpoints import load_checkpoint, save_checkpoint
from thunder_memsave.distributed.data_parallel import DataParallel

Trained = tuple[Net, Optimizer]
TIMEOUT = timedelta(seconds=120)
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
Format = Literal["sharded", "full"]
FORMATS: tuple[Format, ...] = ("sharded", "full")
_SHORT = ("alone", "none on 2", "zero3 on 2", "zero2 on 3")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A sharding of a model over the first ranks."""

    name: str
    num_ranks: int
    data_parallel: DataParallel | None


def layouts(num_ranks: int) -> list[Layout]:
    """Make every mode on each number of ranks; further ranks do not take part. A collective."""
    found = [Layout(name="alone", num_ranks=1, data_parallel=None)]
    for size in range(1, num_ranks + 1):
        group = dist.new_group(list(range(size)), timeout=TIMEOUT)
        modes: tuple[Literal["none", "zero2", "zero3"], ...] = ("none", "zero2", "zero3")
        for mode in modes if size > 1 else ("zero2",):
            dp = DataParallel(mode=mode, group=group)
            found.append(Layout(name=f"{mode} on {size}", num_ranks=size, data_parallel=dp))
    return found + ([hybrid()] if num_ranks == 4 else [])


def hybrid() -> Layout:
    """Make two groups of two ranks, which hold the same. A collective."""
    rows = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in ([0, 2], [1, 3])]
    rank = dist.get_rank()
    dp = DataParallel(
        mode="zero3",
        group=rows[rank // 2],
        replicas=columns[rank % 2],
        world=dist.new_group([0, 1, 2, 3], timeout=TIMEOUT),
    )
    return Layout(name="hybrid on 2 x 2", num_ranks=4, data_parallel=dp)


def check_all(rank: int, root: Path, is_long: bool) -> None:
    """Load from each layout into each other one."""
    known = [one for one in layouts(dist.get_world_size()) if is_long or one.name in _SHORT]
    num_loads = 0
    for number, (optimizer, format) in enumerate(kinds(is_long)):
        references = trained(name=optimizer), trained(steps=5, name=optimizer)
        for source in known:
            path = root / f"{number} {source.name}"
            if rank < source.num_ranks:
                save(path, source, optimizer, format)
            dist.barrier()
            for target in known:
                if rank < target.num_ranks:
                    check_load(path, target, optimizer, references)
                    num_loads += 1
    if rank == 0:
        (root / "num_loads").write_text(str(num_loads))


def kinds(is_long: bool) -> Iterator[tuple[OptimizerName, Format]]:
    if not is_long:
        yield from (("AdamW", "sharded"), ("SGD", "full"))
        return
    for optimizer in OPTIMIZERS:
        yield from ((optimizer, format) for format in FORMATS)


def save(path: Path, layout: Layout, optimizer: OptimizerName, format: Format) -> None:
    net, used = trained(layout.data_parallel, name=optimizer)
    state = {"model": net, "optimizer": used}
    save_checkpoint(path, state, state_dict_type=format, data_parallel=layout.data_parallel)


def check_load(
    path: Path, layout: Layout, optimizer: OptimizerName, references: tuple[Trained, Trained]
) -> None:
    """The loaded state equals the saved one, and trains on as if it had never been on other ranks."""
    dp = layout.data_parallel
    net, used = fresh(dp, name=optimizer)
    load_checkpoint(path, {"model": net, "optimizer": used}, data_parallel=dp)
    assert_same(net, used, references[0], dp)
    train(net, used, range(3, 5), dp)
    assert_same(net, used, references[1], dp)


def test_shards_of_one_two_and_three_ranks_become_each_other(tmp_path: Path) -> None:
    run_on_ranks(check_all, 3, tmp_path / "rendezvous", tmp_path, False)
    assert (tmp_path / "num_loads").read_text() == "32"


@pytest.mark.soak
@pytest.mark.line("reshard")
@pytest.mark.timeout(SOAK_HANG_S)
def test_any_sharding_on_up_to_four_ranks_becomes_any_other(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """This covers both optimizers and both formats, and hybrid sharding too."""
    run_on_ranks(check_all, 4, tmp_path / "rendezvous", tmp_path, True, hang_s=SOAK_HANG_S)
    num_loads = (tmp_path / "num_loads").read_text()
    assert num_loads == "576"
    record_property("measured", f"{num_loads} loads, 0 bits different")

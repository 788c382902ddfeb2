"""Checkpoints of sharded models: bit-exact, and independent of how many ranks wrote them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.distributed import run_on_ranks
from harness.fabric import run_python
from harness.odd_model import Net, assert_same, fresh, make_net, train, trained
from thunder_memsave.checkpoints import (
    CheckpointError,
    StateMismatchError,
    load_checkpoint,
    load_raw,
    save_checkpoint,
    unsharded_state_dict,
)
from thunder_memsave.distributed.agreement import once
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.rows import gather_full, num_real_rows, shard_module

FORMATS: tuple[Literal["sharded", "full"], ...] = ("sharded", "full")


def check_round_trips(rank: int, root: Path) -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))
    dp = DataParallel(mode="zero2", group=group)
    replicas = DataParallel(mode="none", group=group)
    reference = trained()
    for format in FORMATS:
        net, optimizer = trained(dp)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "step": 3, "x": [1]}
        # Only rank 0's path counts.
        path = root / format if rank == 0 else root / "wrong"
        save_checkpoint(path, state, state_dict_type=format, data_parallel=dp)
        for target in (dp, replicas):
            _check_load(root / format, target, reference)
        _check_restored_values_go_on_training(root / format, dp)
        _check_strictness(root / format, dp)
        _check_saved_over(root, format, dp)
    _check_files_of_one_process(root, dp, reference)
    _check_raw(root, dp, reference[0])
    _check_filter(root, dp)
    _check_errors(rank, root, dp)


def _check_load(
    path: Path, dp: DataParallel | None, reference: tuple[Net, torch.optim.Optimizer]
) -> None:
    net, optimizer = fresh(dp)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    state["step"] = 0
    rest = load_checkpoint(path, state, data_parallel=dp)
    assert rest == {"x": [1]}
    assert state["step"] == 3
    assert state["model"] is net
    assert scheduler.step_size == 5
    for group in optimizer.param_groups:
        group.pop("initial_lr")
    assert_same(net, optimizer, reference, dp)


def _check_restored_values_go_on_training(path: Path, dp: DataParallel) -> None:
    net, optimizer = fresh(dp)
    load_checkpoint(path, {"model": net, "optimizer": optimizer}, data_parallel=dp)
    for group in optimizer.param_groups:
        group.pop("initial_lr")
    train(net, optimizer, range(3, 5), dp)
    assert_same(net, optimizer, trained(steps=5), dp)


def _check_strictness(path: Path, dp: DataParallel) -> None:
    net, optimizer = fresh(dp)
    before = unsharded_state_dict(net, dp)
    wide = make_net(width=4)
    shard_module(wide, dp)
    wide.register_parameter("extra", nn.Parameter(torch.ones(2)))
    with pytest.raises(StateMismatchError) as caught:
        load_checkpoint(path, {"model": wide}, data_parallel=dp)
    for text in (
        r"emb.weight: shape (7, 3) in the file, (7, 4) in the model",
        r"up.weight: shape (5, 3) in the file, (5, 4) in the model",
        r"extra: missing: the model has it, the file does not",
    ):
        assert text in str(caught.value)
    half = make_net().to(torch.float16)
    half.kept.data = make_net().kept.data  # fp8 numbers, not converted without their scale
    shard_module(half, dp)
    with pytest.raises(
        StateMismatchError, match=r"up.weight: dtype torch.float32 in the file, torch.float16"
    ):
        load_checkpoint(path, {"model": half}, data_parallel=dp)
    load_checkpoint(path, {"model": half}, strict=False, data_parallel=dp)
    assert torch.equal(gather_full(half.scale, dp), trained()[0].scale.half())
    net.up.bias.requires_grad_(True)
    other = torch.optim.AdamW(net.parameters())
    with pytest.raises(StateMismatchError, match=r"2 parameter groups in the file, 1 in the opti"):
        load_checkpoint(path, {"model": net, "optimizer": other}, data_parallel=dp)
    optimizer.param_groups[1]["params"].append(net.up.bias)
    with pytest.raises(
        StateMismatchError, match=r"up.bias: in parameter group 1 of the optimizer, not of the file"
    ):
        load_checkpoint(path, {"model": net, "optimizer": optimizer}, data_parallel=dp)
    for name, value in unsharded_state_dict(net, dp).items():
        assert torch.equal(value, before[name]), "changed by a load that was refused"
    with pytest.raises(KeyError, match=r"\['epoch'\] was to be loaded from .*'step'"):
        load_checkpoint(path, {"model": net, "epoch": 1}, data_parallel=dp)
    state = {"model": net, "epoch": 1}
    load_checkpoint(path, state, strict=False, data_parallel=dp)
    assert state["epoch"] == 1


def _check_saved_over(root: Path, format: Literal["sharded", "full"], dp: DataParallel) -> None:
    """A checkpoint replaces another one, in either format."""
    path = root / f"again-{format}"
    net, _ = fresh(dp)
    other = FORMATS[1 - FORMATS.index(format)]
    save_checkpoint(path, {"model": net}, state_dict_type=other, data_parallel=dp)
    net, _ = trained(dp)
    for _ in range(2):
        save_checkpoint(path, {"model": net}, state_dict_type=format, data_parallel=dp)
    net, _ = fresh(dp)
    load_checkpoint(path, {"model": net}, data_parallel=dp)
    assert torch.equal(unsharded_state_dict(net, dp)["up.weight"], trained()[0].up.weight)
    assert not list(root.glob(".tmp-*")) + list(root.glob(".old-*"))


def _check_files_of_one_process(
    root: Path, dp: DataParallel, reference: tuple[Net, torch.optim.Optimizer]
) -> None:
    """Load files that one process wrote, with our own functions, or with plain torch.save and positional keys."""
    for name in ("alone-sharded", "alone-full", "plain.pt"):
        net, optimizer = fresh(dp)
        load_checkpoint(root / name, {"model": net, "optimizer": optimizer}, data_parallel=dp)
        assert_same(net, optimizer, reference, dp)


def _check_raw(root: Path, dp: DataParallel, reference: Net) -> None:
    for name in ("raw.pt", "raw.safetensors", "hf"):
        net, _ = fresh(dp)
        load_raw(root / name, net, data_parallel=dp)
        for key, value in unsharded_state_dict(net, dp).items():
            assert torch.equal(value, reference.state_dict()[key]), (name, key)
        assert all(not p.data[num_real_rows(p) :].any() for p in net.parameters() if p.dim())


def _check_filter(root: Path, dp: DataParallel) -> None:
    net, optimizer = trained(dp)
    state = {"model": net, "optimizer": optimizer}
    keep = {"model": lambda name, t: name.startswith("up.") and t.shape[0] == 5}
    path = root / "filtered"
    save_checkpoint(path, state, state_dict_type="full", filter=keep, data_parallel=dp)
    loaded = torch.load(path)
    assert set(loaded["model"]) == {"up.weight", "up.bias"}
    with pytest.raises(ValueError, match=r"filter was given for \['model'\].*state_dict_type='ful"):
        save_checkpoint(path, state, state_dict_type="sharded", filter=keep, data_parallel=dp)
    adapters = unsharded_state_dict(net, dp, names=lambda name: name.startswith("up."))
    assert set(adapters) == {"up.weight", "up.bias"}
    on_zero = unsharded_state_dict(net, dp, rank_zero_only=True)
    assert len(on_zero) == (len(net.state_dict()) if dp.rank == 0 else 0)


def _check_errors(rank: int, root: Path, dp: DataParallel) -> None:
    net, optimizer = trained(dp)
    with pytest.raises(ValueError, match=r"load got a state without a model \(keys: \['step'\]\)"):
        load_checkpoint(root / "sharded", {"step": 1}, data_parallel=dp)
    with pytest.raises(ValueError, match=r"nothing.pt is neither a directory with shards"):
        load_checkpoint(root / "nothing.pt", {"model": net}, data_parallel=dp)
    with pytest.raises(ValueError, match=r"holds more than tensors.*weights_only=False"):
        load_checkpoint(root / "unsafe.pt", {"model": net}, data_parallel=dp)
    optimizer.state[net.up.weight]["row"] = torch.zeros(num_real_rows(net.up.weight))
    state = {"model": net, "optimizer": optimizer}
    for format in FORMATS:
        with pytest.raises(ValueError, match=r"'row' of 'up.weight' has shape"):
            save_checkpoint(root / "bad", state, state_dict_type=format, data_parallel=dp)
        target = root / "taken"
        with pytest.raises(ValueError, match=r"taken was to become a checkpoint, and is a direct"):
            save_checkpoint(target, {"model": net}, state_dict_type=format, data_parallel=dp)
    _check_errors_on_one_rank(rank, root, net, dp)
    # An error on one rank makes the others fail too, instead of leaving them waiting.
    expected = FileExistsError if rank == 0 else CheckpointError
    with pytest.raises(expected, match=r"File exists"):
        once((root / "taken").mkdir, dp)


class FailsOn:
    """State that one rank can neither save nor load."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise OSError("the data are gone")
        return {"position": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state_dict()


def _check_errors_on_one_rank(rank: int, root: Path, net: Net, dp: DataParallel) -> None:
    """The others do not wait for the timeout, and no unfinished checkpoint is left."""
    for format in FORMATS:
        for bad_rank in (0, 1):
            expected = OSError if rank == bad_rank else CheckpointError
            state = {"model": net, "loader": FailsOn(fails=rank == bad_rank)}
            with pytest.raises(expected, match="the data are gone"):
                save_checkpoint(root / "bad", state, state_dict_type=format, data_parallel=dp)
            good = {"model": net, "loader": FailsOn(fails=False)}
            save_checkpoint(root / "good", good, state_dict_type=format, data_parallel=dp)
            with pytest.raises(expected, match="the data are gone"):
                load_checkpoint(root / "good", state, data_parallel=dp)
            dist.barrier(dp.group)  # rank 0 cleans up
            assert not (root / "bad").exists()
            assert not list(root.glob(".tmp-*"))

    def keep(name: str, value: Tensor) -> bool:
        raise KeyError(name)

    with pytest.raises(KeyError if rank == 0 else CheckpointError, match=r"emb\.weight|mixed"):
        save_checkpoint(
            root / "bad",
            {"model": net},
            state_dict_type="full",
            data_parallel=dp,
            filter={"model": keep},
        )
    _check_a_directory_that_one_rank_does_not_see(rank, root, net, dp)


def _check_a_directory_that_one_rank_does_not_see(
    rank: int, root: Path, net: Net, dp: DataParallel
) -> None:
    state, is_dir = {"model": net}, Path.is_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_dir", lambda path: rank == 0 and is_dir(path))
        expected = CheckpointError if rank == 0 else ValueError
        with pytest.raises(expected, match=r"neither a directory with shards"):
            load_checkpoint(root / "sharded", state, data_parallel=dp)
        with pytest.raises(expected, match=r"is not the same directory on all nodes"):
            save_checkpoint(root / "bad", state, state_dict_type="sharded", data_parallel=dp)
    dist.barrier(dp.group)
    assert not list(root.glob(".tmp-*"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Files that one process wrote, before any ranks exist."""
    root = tmp_path / "run"
    root.mkdir()
    net, optimizer = trained()
    state: dict[str, Any] = {"model": net, "optimizer": optimizer}
    save_checkpoint(root / "alone-sharded", state, state_dict_type="sharded", data_parallel=None)
    save_checkpoint(root / "alone-full", state, state_dict_type="full", data_parallel=None)
    plain = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(plain, root / "plain.pt")
    torch.save(net.state_dict(), root / "raw.pt")
    torch.save({"model": {"w": Path("x")}}, root / "unsafe.pt")
    (root / "taken").mkdir()
    (root / "taken" / "notes.txt").write_text("mine")
    _save_safetensors(net, root)
    return root


def _save_safetensors(net: Net, root: Path) -> None:
    import json

    from safetensors.torch import save_file

    # As transformers does: a tied twin is stored once.
    tensors = {n: t.contiguous() for n, t in net.state_dict().items() if n != "head.weight"}
    save_file(tensors, root / "raw.safetensors")
    (root / "hf").mkdir()
    files = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in tensors if files[n] == file}, root / "hf" / file)
    index = {"metadata": {}, "weight_map": files}
    (root / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))


def test_checkpoints_of_two_ranks_and_of_one_process_are_the_same_thing(
    tmp_path: Path, root: Path
) -> None:
    run_on_ranks(check_round_trips, 2, tmp_path / "rendezvous", root)
    reference = trained()
    for format in FORMATS:
        _check_load(root / format, None, reference)
    _check_full_file_is_plain(root / "full", reference)
    _check_consolidated(root / "sharded", reference)


def _check_full_file_is_plain(path: Path, reference: tuple[Net, torch.optim.Optimizer]) -> None:
    loaded = torch.load(path)
    assert loaded["model"].keys() == reference[0].state_dict().keys()
    net = make_net(seed=9)
    net.load_state_dict(loaded["model"])
    assert torch.equal(net.head.weight, reference[0].head.weight)
    assert loaded["optimizer"]["param_groups"][0]["params"] == [
        "mixed",
        "single",
        "emb.weight",
        "up.weight",
        "down.weight",
    ]
    assert loaded["optimizer"]["state"]["emb.weight"]["exp_avg"].shape == (7, 3)


def _check_consolidated(path: Path, reference: tuple[Net, torch.optim.Optimizer]) -> None:
    module = "lightning.fabric.utilities.consolidate_checkpoint"
    run_python(["-m", module, path], num_forks=1, timeout=120)
    loaded = torch.load(path.with_suffix(".consolidated"))
    assert loaded["step"] == 3
    assert loaded["model"].keys() == reference[0].state_dict().keys()
    for name, value in reference[0].state_dict().items():
        assert torch.equal(loaded["model"][name], value), name
    exp_avg = reference[1].state[reference[0].emb.weight]["exp_avg"]
    assert torch.equal(loaded["optimizer"]["state"]["emb.weight"]["exp_avg"], exp_avg)

"""A hostile checkpoint runs no code, and reads and writes nothing outside of its directory."""

from __future__ import annotations

import builtins
import functools
import importlib
import io
import json
import operator
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as dcp_metadata
from lightning.fabric import Fabric
from torch import nn

from harness.fabric import make_fabric
from harness.run_checkpoints import make_state, save, sign_again, weight_of
from thunder_memsave.callbacks.checkpoint import CheckpointInfo
from thunder_memsave.callbacks.verified import load_checkpoint
from thunder_memsave.checkpoints.manifest import DamagedCheckpointError

pytestmark = pytest.mark.line("hostile checkpoints")

CODE = "open('ran', 'w').close()"


class Runs:
    """Pickles as a call."""

    def __init__(self, call: Callable[..., Any], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call, self.arguments


CALLS: dict[str, Any] = {
    "system": Runs(os.system, "touch ran"),
    "exec": Runs(builtins.exec, CODE),
    "eval": Runs(builtins.eval, CODE),
    "open": Runs(builtins.open, "ran", "w"),
    "popen": Runs(subprocess.Popen, ["touch", "ran"]),
    "mkdir": Runs(os.mkdir, "ran"),
    "path": Runs(Path.touch, Path("ran")),
    "partial": Runs(functools.reduce, os.system, ["touch ran"], 0),
    "attrgetter": Runs(operator.attrgetter, "system"),
    "import": Runs(importlib.import_module, "antigravity"),
    "nested pickle": Runs(pickle.loads, pickle.dumps(Runs(os.system, "touch ran"))),
    "torch.load": Runs(torch.load, "nothing.pt"),
    "hub": Runs(torch.hub.load, "nowhere", "nothing"),
}


def in_metadata(fabric: Fabric, directory: Path, evil: object) -> Path:
    path = save(fabric, directory, step=1)
    (path / "state" / ".metadata").write_bytes(pickle.dumps(evil))
    return path


def beside_good_metadata(fabric: Fabric, directory: Path, evil: object) -> Path:
    """Write a valid table that also holds a call."""

    def change(metadata: Any) -> None:
        metadata.version = evil

    return with_metadata(fabric, directory, change)


def in_a_value(fabric: Fabric, directory: Path, evil: object) -> Path:
    return behind_the_values(fabric, directory, evil, entry="betas")


def in_a_weight(fabric: Fabric, directory: Path, evil: object) -> Path:
    return behind_the_values(fabric, directory, evil, entry="model.weight")


def behind_the_values(fabric: Fabric, directory: Path, evil: object, *, entry: str) -> Path:
    """Put a call into DCP's own file, and name it in DCP's table in place of the value."""
    buffer = io.BytesIO()
    torch.save(evil, buffer)

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn.endswith(entry):
                info.offset, info.length = size, len(buffer.getvalue())

    path = save(fabric, directory, step=1)
    size = (path / "state" / "__0_0.distcp").stat().st_size
    with (path / "state" / "__0_0.distcp").open("ab") as file:
        file.write(buffer.getvalue())
    change_metadata(path, change)
    return path


def in_the_rest(fabric: Fabric, directory: Path, evil: object) -> Path:
    return save(fabric, directory, step=1, name=evil)


def in_random_states(fabric: Fabric, directory: Path, evil: object) -> Path:
    path = save(fabric, directory, step=1)
    torch.save({"python": evil}, path / "random-00000.pt")
    return path


PLACES = [in_metadata, beside_good_metadata, in_a_value, in_a_weight, in_the_rest, in_random_states]


def with_metadata(fabric: Fabric, directory: Path, change: Callable[[Any], None]) -> Path:
    path = save(fabric, directory, step=1)
    change_metadata(path, change)
    return path


def change_metadata(path: Path, change: Callable[[Any], None]) -> None:
    file = path / "state" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Record every file that is opened, created, renamed or removed."""
    global _seen
    _seen = []
    if not _is_watching:
        sys.addaudithook(_watch)
        _is_watching.append(True)
    yield _seen
    _seen = None


_seen: list[str] | None = None
_is_watching: list[bool] = []  # an audit hook cannot be removed


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _seen is not None and event.startswith(("open", "os.", "shutil.", "subprocess.")):
        _seen.append(f"{event} {arguments[:1]}")


def refusal(fabric: Fabric, path: Path) -> str:
    """Return the refusal, and check that nothing changed and nothing was run."""
    state = make_state(fabric, 0.0, step=0)
    info = CheckpointInfo(path=path, world_size=1, values={})
    with pytest.raises((ValueError, KeyError)) as raised:
        load_checkpoint(fabric, info, state)
    assert not Path("ran").exists()
    assert state["step"] == 0 or "random" in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("call", CALLS)
def test_code_is_not_run(tmp_path: Path, call: str, place: Callable[..., Path]) -> None:
    fabric = make_fabric()
    path = place(fabric, tmp_path / "run", CALLS[call])
    Path("ran").unlink(missing_ok=True)
    sign_again(path)
    assert "could run code" in refusal(fabric, path)


MODULE = b"torch.distributed.checkpoint.metadata"
DOTTED = (
    b"\x80\x04\x8c"
    + bytes([len(MODULE)])
    + MODULE
    + b"\x8c\x09os.system\x93\x8c\x09touch ran\x85R."
)
STACKED = b"ctorch.distributed.checkpoint.filesystem\nos\n0cos\nsystem\n(S'touch ran'\ntR."


@pytest.mark.parametrize("pickled", [DOTTED, STACKED])
def test_a_name_within_an_allowed_module_is_not_allowed(tmp_path: Path, pickled: bytes) -> None:
    fabric = make_fabric()
    path = save(fabric, tmp_path, step=1)
    (path / "state" / ".metadata").write_bytes(pickled)
    sign_again(path)
    assert "which is not part of a checkpoint; loading it could run code" in refusal(fabric, path)


def test_a_pickle_cannot_change_the_classes_that_it_names(tmp_path: Path) -> None:
    fabric = make_fabric()
    path = save(fabric, tmp_path, step=1)
    # BUILD on the class itself, which pickle turns into setattr.
    change = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}U\x04evilK\x01s\x86b."
    (path / "state" / ".metadata").write_bytes(change)
    sign_again(path)
    refusal(fabric, path)
    assert not hasattr(dcp_metadata.Metadata, "evil")


LARGE = 2**34
GROWING = {
    "memo": b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", LARGE) + b".",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", LARGE) + b".",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", LARGE) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", LARGE) + b"N.",
    "number": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".",
}


@pytest.mark.parametrize("name", GROWING)
def test_a_few_bytes_of_a_pickle_take_no_gigabytes(tmp_path: Path, name: str) -> None:
    fabric = make_fabric()
    path = save(fabric, tmp_path, step=1)
    (path / "state" / ".metadata").write_bytes(GROWING[name])
    sign_again(path)
    with at_most_more_bytes(2**32):
        message = refusal(fabric, path)
    assert "has no readable .metadata file" in message
    assert "MemoryError" not in message


@contextmanager
def at_most_more_bytes(num_bytes: int) -> Iterator[None]:
    """Limit the address space beyond what this process has; more raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    room = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def rename_in_storage(name: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    return change


def set_in_storage(**values: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(values)

    return change


def set_in_tensors(**values: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for entry in metadata.state_dict_metadata.values():
            if hasattr(entry, "size"):
                vars(entry).update(values)

    return change


def drop_places(metadata: Any) -> None:
    metadata.planner_data.clear()


def bad_place(metadata: Any) -> None:
    metadata.planner_data = dict.fromkeys(metadata.planner_data, (2.5,))


def cut_the_weight(*places: tuple[int, int]) -> Callable[[Any], None]:
    """Split into shards of 5 columns, given by first row and number of rows; all are in the one file."""

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["model.weight"]
        (whole,) = (key for key in metadata.storage_data if key.fqn == "model.weight")
        entry.chunks = []
        for row, rows in places:
            offsets, sizes = torch.Size([row, 0]), torch.Size([rows, 5])
            entry.chunks.append(dcp_metadata.ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            index = dcp_metadata.MetadataIndex("model.weight", offsets)
            metadata.storage_data[index] = metadata.storage_data[whole]

    return change


def drop_storage(metadata: Any) -> None:
    metadata.storage_data.clear()


CHANGES = {
    "holes": (cut_the_weight((0, 1), (2, 1)), "shards of a tensor leave holes"),
    "a hole at the end": (cut_the_weight((0, 2)), "shards of a tensor leave holes"),
    "no shards": (cut_the_weight(), "shards of a tensor leave holes"),
    "overlap": (cut_the_weight((0, 2), (1, 2)), "shards of a tensor overlap"),
    "twice": (cut_the_weight((0, 3), (0, 3)), "shards of a tensor overlap"),
    "overlap of the right size": (cut_the_weight((0, 2), (0, 1)), "shards of a tensor overlap"),
    "nowhere": (drop_storage, "it does not say where all of"),
    "../outside.distcp": (
        rename_in_storage("../outside.distcp"),
        "'../outside.distcp', and there is no su",
    ),
    "../../outside.distcp": (
        rename_in_storage("../../outside.distcp"),
        "and there is no such file",
    ),
    "absolute": (
        rename_in_storage("/etc/passwd"),
        "'/etc/passwd', and there is no such file beside",
    ),
    "not a name": (rename_in_storage(""), "and there is no such file beside it"),
    "beyond the end": (set_in_storage(length=10**12), "beyond its end"),
    "offset": (set_in_storage(offset=10**12), "beyond its end"),
    "negative": (set_in_storage(offset=-1), "-1 is where a number of at least 0 should be"),
    "a bool": (set_in_storage(offset=True), "True is where a number of at least 0 should be"),
    "transformed": (set_in_storage(transform_descriptors=["zstd"]), "transformed before it is"),
    "huge": (set_in_tensors(size=torch.Size([2**40])), "does not fit into the files there"),
    "overflow": (set_in_tensors(size=torch.Size([2**62, 2**62])), "does not fit into the files"),
    "no shape": (set_in_tensors(size=[3, 5]), "is where a shape should be"),
    "other chunks": (set_in_tensors(size=torch.Size([1, 1])), "a shard reaches beyond its tensor"),
    "dims": (set_in_tensors(size=torch.Size([4])), "another number of dims than its tensor"),
    "no places": (drop_places, "its entries and their places differ"),
    "bad place": (bad_place, "2.5 is where a number of at least 0 should be"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_reaches_nothing_outside_and_claims_nothing_that_is_not_there(
    tmp_path: Path, name: str, opened: list[str]
) -> None:
    fabric = make_fabric()
    change, message = CHANGES[name]
    path = with_metadata(fabric, tmp_path / "run", change)
    sign_again(path)
    for outside in (path / "outside.distcp", path.parent / "outside.distcp"):
        shutil.copy(path / "state" / "__0_0.distcp", outside)
    opened.clear()
    assert message in refusal(fabric, path)
    assert not [place for place in opened if "outside" in place or "/etc/passwd" in place]


@pytest.mark.parametrize(
    "name", ["random-00000.pt", "state/__0_0.distcp", "state/meta.pt", "state/.metadata", "state"]
)
def test_links_are_not_followed(tmp_path: Path, name: str, opened: list[str]) -> None:
    fabric = make_fabric()
    path, outside = save(fabric, tmp_path / "run", step=1), tmp_path / "outside"
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    opened.clear()
    assert "is a link, and none is followed" in refusal(fabric, path)
    assert not [place for place in opened if "outside" in place or f"'{path / name}'" in place]


def test_a_checkpoint_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    fabric = make_fabric()
    path, outside = save(fabric, tmp_path / "run", step=1), tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    assert "it is a link, and none is followed" in refusal(fabric, path)


@pytest.mark.parametrize("name", ["../outside.pt", "/etc/passwd", "state/../../outside.pt"])
def test_the_manifest_names_nothing_outside(tmp_path: Path, name: str, opened: list[str]) -> None:
    import hashlib

    fabric = make_fabric()
    path = save(fabric, tmp_path / "run", step=1)
    content = json.loads((path / "manifest.json").read_text())
    content["files"][name] = {"num_bytes": 0, "sha256": "0" * 64}
    text = json.dumps(content).encode()
    (path / "manifest.json").write_bytes(text)
    line = f"{hashlib.sha256(text).hexdigest()}  manifest.json\n"
    (path / "manifest.sha256").write_text(line)
    opened.clear()
    assert f"{name!r} is not the name of a file within the checkpoint" in refusal(fabric, path)
    assert not [place for place in opened if "outside" in place or "/etc/passwd" in place]


@pytest.mark.parametrize("name", ["random-00000.pt", "state/meta.pt", "state/__0_0.distcp"])
def test_what_grows_when_it_is_read_is_refused(tmp_path: Path, name: str) -> None:
    fabric = make_fabric()
    path = save(fabric, tmp_path, step=1)
    file = path / name
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 2**24)
    if name == "state/__0_0.distcp":
        change_metadata(path, set_in_storage(offset=0, length=file.stat().st_size))
    sign_again(path)
    assert "holds compressed entries, which torch.save does not write" in refusal(fabric, path)


@pytest.mark.parametrize(
    ("evil", "said"),
    [
        (torch.zeros(2, 5), r"one of shape \(2, 5\) and torch.float32, torch.strided is"),
        (torch.zeros(4, 6), r"one of shape \(4, 6\) and torch.float32, torch.strided is"),
        (torch.zeros(()), r"one of shape \(\) and"),
        (torch.zeros(3, 5).double(), r"one of shape \(3, 5\) and torch.float64, torch.strided is"),
        (torch.zeros(3, 5).to_sparse(), r"one of shape \(3, 5\) .*sparse_coo is"),
        (nn.Parameter(torch.zeros(3, 5)), r"a Parameter is"),
        ("text", "a str is"),
        (None, "a NoneType is"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # torch 2.14
def test_a_weight_that_is_another_is_refused(tmp_path: Path, evil: object, said: str) -> None:
    fabric = make_fabric()
    path = in_a_weight(fabric, tmp_path, evil)
    sign_again(path)
    state = make_state(fabric, 0.0, step=0)
    with pytest.raises(
        DamagedCheckpointError,
        match=rf"'model.weight' does not hold what .* shape \(3, 5\) and .* there, and {said}",
    ):
        load_checkpoint(fabric, CheckpointInfo(path=path, world_size=1, values={}), state)
    assert state["step"] == 0


@pytest.mark.parametrize("content", [b"", b"PK", b"no zip at all" * 99])
def test_what_is_no_file_of_torch_is_refused(tmp_path: Path, content: bytes) -> None:
    fabric = make_fabric()
    path = save(fabric, tmp_path, step=1)
    (path / "random-00000.pt").write_bytes(content)
    sign_again(path)
    assert "random-00000.pt does not hold what torch.save writes" in refusal(fabric, path)


def test_random_states_that_are_none_are_refused(tmp_path: Path) -> None:
    fabric = make_fabric()
    path = save(fabric, tmp_path, step=1)
    torch.save({"python": (3, (1, 2), None)}, path / "random-00000.pt")
    sign_again(path)
    assert "does not hold the states of random generators" in refusal(fabric, path)


def test_what_is_not_hostile_is_loaded(tmp_path: Path) -> None:
    fabric = make_fabric()
    path = with_metadata(fabric, tmp_path, lambda metadata: None)
    sign_again(path)
    state = make_state(fabric, 0.0, step=0)
    load_checkpoint(fabric, CheckpointInfo(path=path, world_size=1, values={}), state)
    assert (weight_of(state), state["step"]) == (1.0, 1)


@pytest.mark.parametrize("call", ["system", "exec", "mkdir", "path", "nested pickle"])
def test_plain_pickle_would_run_that_code(call: str) -> None:
    pickle.loads(pickle.dumps(CALLS[call]))
    assert Path("ran").exists()

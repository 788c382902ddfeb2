"""A manifest covers every byte of a checkpoint; every difference is reported."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from thunder_memsave.checkpoints.manifest import (
    DamagedCheckpointError,
    Manifest,
    UnverifiableCheckpointError,
    files_in,
    read_manifest,
    record_file,
    require_files,
    require_layout,
    share_of_files,
    write_manifest,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write one rank's checkpoint, with three small files in place of tensors."""
    path = tmp_path / "step-00000001"
    (path / "state").mkdir(parents=True)
    (path / "random-00000.pt").write_bytes(b"random")
    (path / "state" / "meta.pt").write_bytes(b"meta")
    (path / "state" / ".metadata").write_bytes(b"table")
    (path / "state" / "__0_0.distcp").write_bytes(b"tensors")
    write_manifest(path, manifest_of(path))
    return path


def manifest_of(path: Path) -> Manifest:
    return Manifest(
        step=1,
        world_size=1,
        sharding="zero2",
        versions={"torch": "2"},
        values={"step": 1, "lr": float("inf")},
        tensors={"model": {"w": {"shape": [2], "dtype": "float32", "is_trained": True}}},
        files={name: record_file(path, name) for name in files_in(path)},
    )


def damage_of(path: Path) -> str:
    with pytest.raises(DamagedCheckpointError) as raised:
        verify(path)
    return str(raised.value)


def verify(path: Path) -> None:
    manifest = read_manifest(path)
    require_layout(path, manifest)
    require_files(path, manifest, manifest.files)


def rewrite(path: Path, **changes: Any) -> None:
    """Write a changed manifest with a matching checksum."""
    content = json.loads((path / "manifest.json").read_text()) | changes
    write_text(path, json.dumps(content))


def write_text(path: Path, text: str) -> None:
    (path / "manifest.json").write_text(text)
    line = f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n"
    (path / "manifest.sha256").write_text(line)


def test_a_manifest_is_read_as_it_was_written(checkpoint: Path) -> None:
    assert read_manifest(checkpoint) == manifest_of(checkpoint)
    require_layout(checkpoint, manifest_of(checkpoint))
    require_files(checkpoint, manifest_of(checkpoint), files_in(checkpoint))


def test_the_checksum_is_one_that_sha256sum_checks(checkpoint: Path) -> None:
    subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=checkpoint, check=True)


def test_a_changed_byte_is_named_with_both_checksums(checkpoint: Path) -> None:
    (checkpoint / "state" / "meta.pt").write_bytes(b"mete")
    new, old = (hashlib.sha256(text).hexdigest()[:12] for text in (b"mete", b"meta"))
    assert damage_of(checkpoint) == (
        f"state/meta.pt has the SHA-256 {new}..., and had {old}... when it was written: some of its bytes changed"
    )


def test_a_file_of_another_length_is_named_with_both(checkpoint: Path) -> None:
    (checkpoint / "state" / "__0_0.distcp").write_bytes(b"tens")
    assert damage_of(checkpoint) == "state/__0_0.distcp has 4 bytes, and had 7 when it was written"


@pytest.mark.parametrize("name", ["random-00000.pt", "state/meta.pt", "manifest.json"])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    assert damage_of(checkpoint) == f"{name} is missing"


def test_what_the_manifest_does_not_name_and_nothing_reads_is_no_damage(checkpoint: Path) -> None:
    (checkpoint / "notes.txt").write_text("the user's own")
    (checkpoint / "state" / ".nfs0001").write_text("the file system's own")
    verify(checkpoint)


@pytest.mark.parametrize("name", ["state/meta.pt", "state/.metadata"])
def test_what_is_read_must_be_named(checkpoint: Path, name: str) -> None:
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    del files[name]
    rewrite(checkpoint, files=files)
    assert damage_of(checkpoint) == f"manifest.json does not name {name}, which is read"


@pytest.mark.parametrize("name", ["random-00000.pt", "state/meta.pt", "manifest.json", "state"])
def test_a_link_is_not_followed(checkpoint: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    (checkpoint / name).rename(elsewhere)
    (checkpoint / name).symlink_to(elsewhere)
    assert f"{name} is " in damage_of(checkpoint)


def test_a_pipe_is_not_waited_for(checkpoint: Path) -> None:
    (checkpoint / "random-00000.pt").unlink()
    os.mkfifo(checkpoint / "random-00000.pt")
    assert damage_of(checkpoint) == "random-00000.pt is not a regular file"


RECORD = {"num_bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 0}, "its format is 0, and this version reads (1, 2)"),
        ({"step": -1}, "step is -1"),
        ({"world_size": True}, "world_size is True"),
        ({"values": []}, "values is not a mapping"),
        ({"more": 1}, "unexpected keyword argument 'more'"),
        ({"files": []}, "AttributeError"),
        ({"files": {"../../etc/passwd": RECORD}}, "'../../etc/passwd' is not the name of a file"),
        ({"files": {"state/../x": RECORD}}, "'state/../x' is not the name of a file within"),
        ({"files": {"/etc/passwd": RECORD}}, "'/etc/passwd' is not the name of a file within"),
        ({"files": {"state/..": RECORD}}, "'state/..' is not the name of a file within"),
        ({"files": {"a": {**RECORD, "num_bytes": -1}}}, "a cannot have -1 bytes"),
        ({"files": {"a": {**RECORD, "sha256": "0"}}}, "a has no SHA-256"),
        ({"files": {"a": RECORD}}, "names 0 random states of 1 ranks and 1 other files, which is"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    rewrite(checkpoint, **changes)
    assert message in damage_of(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": []}, "metrics is not a mapping"),
        ({"metrics": {"val_loss": "low"}}, "a metric is not a number"),
        ({"config": []}, "config is not a mapping"),
    ],
)
def test_what_a_manifest_says_of_the_run_must_be_plain(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    rewrite(checkpoint, **changes)
    assert message in damage_of(checkpoint)


def test_a_manifest_of_the_format_before_is_read_and_a_newer_one_is_no_damage(
    checkpoint: Path,
) -> None:
    rewrite(checkpoint, format=1)
    assert read_manifest(checkpoint).step == 1
    rewrite(checkpoint, format=3)
    with pytest.raises(UnverifiableCheckpointError, match=r"of format 3, and .* reads up to 2: it"):
        read_manifest(checkpoint)


def test_a_long_name_of_a_file_takes_no_long_time(checkpoint: Path) -> None:
    rewrite(checkpoint, files={"a" * 2**20 + "/": RECORD})
    start = time.process_time()
    assert "a' is not the name of a file within the checkpoint" in damage_of(checkpoint)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "[" * 100_000])
def test_a_manifest_that_is_none_is_refused(checkpoint: Path, text: str) -> None:
    write_text(checkpoint, text)
    assert "manifest.json is invalid (" in damage_of(checkpoint)


def test_a_manifest_of_any_size_is_not_read(checkpoint: Path) -> None:
    with (checkpoint / "manifest.json").open("r+b") as file:
        file.truncate(10**12)  # takes no space
    assert damage_of(checkpoint) == "manifest.json has more than 67,108,864 bytes"


def test_a_checkpoint_from_before_manifests_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text("{}")
    with pytest.raises(
        UnverifiableCheckpointError,
        match=r"was written without a manifest.json by a version .* start a new run in another outp",
    ):
        read_manifest(tmp_path)


def test_each_rank_hashes_what_it_wrote() -> None:
    names = ["state/__0_0.distcp", "state/__1_0.distcp", "state/meta.pt", "random-00003.pt"]
    shares = [share_of_files(names, rank=rank, world_size=2) for rank in range(2)]
    assert shares == [["state/__0_0.distcp", "state/meta.pt"], names[1::2]]

"""Checkpoints go to and come from S3, as a server of moto on this machine speaks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
from moto import server

from harness.commands import run_command
from harness.language_model import run_values, write_run_file
from harness.unsteady_store import content_of, write_checkpoint
from thunder_memsave.checkpoints.addresses import AddressError, RunAtAddress
from thunder_memsave.checkpoints.manifest import DamagedCheckpointError, read_manifest

ADAPTER = "adapter/adapter_model.safetensors"
NAME = "step-00000004"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of an empty bucket; the endpoint and keys come from fsspec's configuration and the environment."""
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
        s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


def test_a_checkpoint_comes_back_as_it_was_written(bucket: str, tmp_path: Path) -> None:
    run, path = RunAtAddress(f"{bucket}/some/run"), write_checkpoint(tmp_path / "here", 4)
    assert run.names() == []
    run.upload(path)
    run.upload(path)
    assert run.names() == [NAME]
    signed = run.find(NAME)
    assert signed is not None
    run.download(NAME, signed, tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(path)
    tensors = f"bucket/some/run/checkpoints/{NAME}/state/__0_0.distcp"
    s3fs.S3FileSystem().pipe_file(tensors, b"X" * (path / "state/__0_0.distcp").stat().st_size)
    with pytest.raises(DamagedCheckpointError, match=r"state/__0_0.distcp has the SHA-256"):
        run.download(NAME, signed, tmp_path / "flipped")
    s3fs.S3FileSystem().rm_file(tensors)
    with pytest.raises(DamagedCheckpointError, match=r"state/__0_0.distcp is missing"):
        run.find(NAME)
    run.upload(path)
    assert run.find(NAME) == signed
    run.delete(NAME)
    assert run.names() == []


@pytest.mark.parametrize("at", range(6))
def test_an_upload_that_breaks_off_is_no_checkpoint(
    bucket: str, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = RunAtAddress(f"{bucket}/broken/{at}"), write_checkpoint(tmp_path / "here", 4)
    filesystem, num_done = run._fs, 0
    puts, pipes = filesystem.put_file, filesystem.pipe_file

    def count() -> None:
        nonlocal num_done
        num_done += 1
        if num_done > at:
            raise KeyboardInterrupt

    def put_file(*args: object) -> None:
        count()
        puts(*args)

    def pipe_file(*args: object) -> None:
        count()
        pipes(*args)

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "put_file", put_file)
        patch.setattr(filesystem, "pipe_file", pipe_file)
        with pytest.raises(KeyboardInterrupt):
            run.upload(path)
    assert run.find(NAME) is None
    run.upload(path)
    assert run.find(NAME) is not None


def test_a_bucket_that_does_not_exist_is_not_made(bucket: str, tmp_path: Path) -> None:
    run, path = RunAtAddress("s3://no-such-bucket/run"), write_checkpoint(tmp_path, 4)
    with pytest.raises(
        AddressError, match=r"s3://no-such-bucket/run/checkpoints/\S+ cannot be wri"
    ):
        run.upload(path)
    assert s3fs.S3FileSystem().ls("") == ["bucket"]


def test_a_run_goes_on_on_another_machine_with_the_same_bits(
    bucket: str, one_layer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model, too, is in the bucket."""
    monkeypatch.setenv("THUNDER_MEMSAVE_CACHE", str(tmp_path / "cache"))
    address, model = f"{bucket}/runs/first", f"{bucket}/models/one_layer"
    s3fs.S3FileSystem().put(f"{one_layer}/", f"{model}/", recursive=True)
    section = {"every_n_steps": 2, "keep_last": 2, "copy_to": address}
    values = run_values(tmp_path, one_layer, checkpoint=section)
    values["model"]["name_or_path"] = model
    run_file = write_run_file(tmp_path, values)
    run_command("train", str(run_file))
    run, first, other = RunAtAddress(address), tmp_path / "run", tmp_path / "other"
    assert run.names() == ["step-00000002", NAME]
    uploaded = s3fs.S3FileSystem().cat_file(f"bucket/runs/first/{ADAPTER}")
    assert uploaded == (first / ADAPTER).read_bytes()
    assert run.newest_export() == "adapter"
    assert model in (first / "adapter" / "adapter_config.json").read_text()
    (copied,) = [p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()]
    assert content_of(copied) == content_of(one_layer)
    run.get_export("adapter", tmp_path / "exported")
    assert content_of(tmp_path / "exported") == content_of(first / "adapter")
    run.delete(NAME)
    run_command("train", str(run_file), f"--output_dir={other}", "--resume=auto")
    assert (other / ADAPTER).read_bytes() == uploaded
    signed = run.find(NAME)
    assert signed is not None
    assert signed.manifest == read_manifest(other / "checkpoints" / NAME)

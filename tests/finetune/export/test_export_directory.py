"""Paths that an export may be written to, and the file that an error names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thunder_memsave.finetune.export.export_directory import check_out, directory_for
from thunder_memsave.settings.problems import ConfigError


def test_what_the_rename_cannot_replace_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, link, dangling = tmp_path / "empty", tmp_path / "link", tmp_path / "dangling"
    empty.mkdir()
    link.symlink_to(empty)
    dangling.symlink_to(tmp_path / "nowhere")
    check_out(empty)
    check_out(tmp_path / "new")
    for path, target in ((link, empty), (dangling, tmp_path / "nowhere")):
        message = rf"is a link to {target}; name a directory that is not there yet, such as {target}/model\.$"
        with pytest.raises(ConfigError, match=message):
            check_out(path)
    with pytest.raises(ConfigError, match="is /proc, which is where a file system is mounted and"):
        check_out(Path("/proc"))
    monkeypatch.chdir(empty)
    message = r"is \., which is the directory that you are in and cannot .*, such as model\.$"
    with pytest.raises(ConfigError, match=message):
        check_out(Path())


def test_a_file_elsewhere_that_cannot_be_read_is_not_blamed_on_out(tmp_path: Path) -> None:
    out, base = tmp_path / "out", tmp_path / "base.safetensors"
    message = rf"^cannot export: .*{base}.*; nothing was written to {out}\. Correct that, and export again\.$"
    with pytest.raises(ConfigError, match=message), directory_for(out):
        base.read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_export_that_cannot_be_written_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    message = rf"^cannot export to {out}: .*No such file.*; nothing was written\. Correct that, or name another"
    with pytest.raises(ConfigError, match=message), directory_for(out) as directory:
        (directory / "not_there" / "file").write_text("")
    with pytest.raises(ConfigError, match=message), directory_for(out):
        raise OSError("No such file, says a library without a number")
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_is_none_of_a_disk_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ours"), directory_for(tmp_path / "out"):
        raise RuntimeError("ours")
    with pytest.raises(ConfigError, match=r"^\[Errno 5\] quoted$"), directory_for(tmp_path / "out"):
        raise ConfigError("[Errno 5] quoted")
    assert os.listdir(tmp_path) == []

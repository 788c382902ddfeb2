"""A data set of the hub is read through the datasets library, and what cannot be fetched is one kind message."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from harness.language_model import write_jsonl
from thunder_memsave.finetune.data import DataFiles
from thunder_memsave.finetune.data.files import hub_data
from thunder_memsave.finetune.data.files.hub_data import HubData
from thunder_memsave.settings.problems import ConfigError

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the package datasets is not installed"
)


def use_library(monkeypatch: pytest.MonkeyPatch, load: Any, version: str = "5.2.0") -> None:
    fake = SimpleNamespace(load_dataset=load, __version__=version)
    monkeypatch.setattr(hub_data, "import_module", lambda name: fake)


def test_its_files_are_those_of_the_librarys_cache(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load(name: str, subset: str | None, **options: Any) -> SimpleNamespace:
        asked.append((name, subset, options))
        text = "red" if options["split"] == "train" else "blue"
        path = write_jsonl(tmp_path / f"{options['split']}.jsonl", [{"text": text}] * 2)
        return SimpleNamespace(cache_files=[{"filename": str(path)}])

    use_library(monkeypatch, load)
    path: list[Any] = [{"hub": "owner/name", "subset": "main", "revision": "v1", "weight": 2}]
    val_path = {"hub": "owner/name", "split": "test"}
    split = DataFiles(path=path, val_path=val_path).load(tokenizer)
    assert [each.parts[0].text for each in split.train] == ["red"] * 4
    assert [each.parts[0].text for each in split.validation] == ["blue"] * 2
    assert split.described.startswith("owner/name (main, train): JSONL, 2 rows of texts")
    options = {"split": "train", "revision": "v1", "keep_in_memory": False}
    assert asked[0] == ("owner/name", "main", options)
    assert asked[1][2]["split"] == "test"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError("Dataset 'o/n' doesn't exist"), "doesn't exist. Check the name, and"),
        (ConnectionError("Couldn't reach 'o/n'"), "reach 'o/n'. Check the name, and whether this"),
        (ValueError("Config name is missing.\nPick one."), "is missing. Name the subset or split"),
        (RuntimeError("Dataset scripts are no longer supported"), "are no longer supported. Name"),
    ],
)
@pytest.mark.parametrize("is_offline", [False, True])
def test_what_cannot_be_loaded_is_one_message(
    error: Exception, told: str, is_offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise error

    use_library(monkeypatch, load)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: is_offline)
    expected = "HF_HUB_OFFLINE is set" if is_offline else told
    with pytest.raises(ConfigError, match=r"cannot load o/n \(train\) from the hub") as refused:
        DataFiles(path={"hub": "o/n"}).load(None)
    assert expected in str(refused.value)
    assert refused.value.key == "data.dataset.init_args.path"


def test_without_the_library_or_with_an_old_one_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_library(monkeypatch, None, version="3.6.0")
    with pytest.raises(ConfigError, match="needs datasets 4 or later, which runs no code"):
        HubData(name="o/n").files()

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(hub_data, "import_module", missing)
    with pytest.raises(ConfigError, match="needs the package datasets: pip install datasets"):
        HubData(name="o/n").files()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ({"hub": "a/b/c"}, "'a/b/c', which is no name on the hub"),
        ({"hub": "../secret"}, "no name on the hub"),
        ({"hub": "a/b", "split": "train[:5%]"}, "must be the name of one split"),
        ({"hub": "a/b", "file": "x"}, "write a path, {path: a.jsonl"),
        ({"hub": "a/b", "path": "x"}, "write a path, {path: a.jsonl"),
        ({"hub": 3}, "write a path, {path: a.jsonl"),
        ([3], "write a path, {path: a.jsonl"),
        ([{"hub": "a/b"}, {"hub": "a/b"}], "names a/b (train) twice"),
        ("owner/name", "A data set of the hub is {hub: owner/name}"),
    ],
)
def test_a_wrong_name_says_what_to_write(path: Any, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DataFiles(path=path).load(None)
    assert told in str(refused.value)
    assert refused.value.key == "data.dataset.init_args.path"


def test_a_split_for_validation_may_not_be_the_one_that_is_trained_on() -> None:
    with pytest.raises(ConfigError, match=r"val_path is a/b \(train\), "):
        DataFiles(path={"hub": "a/b"}, val_path={"hub": "a/b"})


@needs_datasets
def test_the_library_itself_reads_a_data_set_and_misses_one_offline(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = importlib.import_module("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    write_jsonl(tmp_path / "owner" / "name" / "train.jsonl", [{"messages": chat, "tools": tools}])
    monkeypatch.chdir(tmp_path)
    (file,) = HubData(name="owner/name").files()
    assert file.suffix == ".arrow"
    dataset = DataFiles(path={"hub": "owner/name"})
    assert dataset.sources[0].format.name == "messages"
    dataset.check_rows()
    with pytest.raises(ConfigError, match=r"cannot load owner/other \(train\) from the hub"):
        HubData(name="owner/other").files()

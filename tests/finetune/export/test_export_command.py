"""`thunder-memsave export`: its files compute in transformers and peft what the run's own model does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.language_model import llama_config, run_values, write_model, write_run_file
from thunder_memsave.callbacks import ModelCheckpoint
from thunder_memsave.checkpoints.sources import SafetensorsSource
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.export import verified_export
from thunder_memsave.finetune.export.export import export
from thunder_memsave.finetune.export.export_command import parse_export_options, run_export
from thunder_memsave.finetune.export.merged import MergedWeights
from thunder_memsave.finetune.model import safetensors_files
from thunder_memsave.finetune.model.build import build_model, load_tokenizer
from thunder_memsave.finetune.model.trained_part import trained_part
from thunder_memsave.finetune.output.run_directory import RunDirectory
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.materialize.pending_weights import fingerprint_of_files, names_in_files
from thunder_memsave.sharding.rows import local_rows

WORLD_SIZE = 3  # by which no dim of the models can be divided
STEP = "step-00000003"
# How the weights are written: by peft, or as a merged model.
NAMES = {(): "safe_save_file", ("--merge",): "save_file"}
# float32 sums in another order, and the merged weights are rounded
TOLERANCE = 1e-6

LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
RUNS: dict[str, dict[str, Any]] = {
    "lora": {"lora": LORA},
    "bf16": {"lora": LORA, "model": {"dtype": "bfloat16"}},
    "head": {"lora": {**LORA, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}},
    "full": {"lora": None},
    "ia3": {"lora": None, "adapter": {"class_path": "IA3Config"}},
    "vera": {
        "lora": None,
        "adapter": {"class_path": "VeraConfig", "init_args": {"target_modules": ["q_proj"]}},
    },
    "random": {"lora": LORA, "model": {"config": {"model_type": "llama", **llama_config()}}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make output directories as three processes leave them, and what training itself exports at its end."""
    root = tmp_path_factory.mktemp("runs")
    write_model(root / "base", tie_word_embeddings=False)
    write_model(root / "tied", tie_word_embeddings=True)
    for name, sections in RUNS.items():
        (root / name).mkdir()
        base = root / ("tied" if name in ("head", "full") else "base")
        write_run_file(root / name, run_values(root / name, base, **sections))
    run_on_fabric_ranks(save_runs, WORLD_SIZE, root)
    return root


@on_fabric_rank
def save_runs(root: Path) -> None:
    for name in RUNS:
        save_run(root / name)


def save_run(directory: Path) -> None:
    """Write what `train` saves, with random values instead of training."""
    config = load_run_config(directory / "run.yaml")
    tokenizer = load_tokenizer(config.model)
    model: Any = build_model(config, tokenizer)
    in_files: frozenset[str] = frozenset()
    if not all(p.requires_grad for p in model.parameters()):
        in_files = names_in_files(model)
    base = {"base_model": fingerprint_of_files(model)} if in_files else {}
    fabric = make_fabric(devices=WORLD_SIZE, timeout="1min")
    module = fabric.setup(model)
    torch.manual_seed(1)  # the same rows on all ranks, which does not matter
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                local_rows(p, p).uniform_(-0.1, 0.1)
    state = {"model": trained_part(model, in_files=in_files), "step": 3, **base}
    run = RunDirectory(root=directory / "run")
    ModelCheckpoint(run.checkpoints).save(fabric, state, step=3)
    if fabric.is_global_zero:
        run.create(config)
    fabric.barrier()
    export(fabric, module, tokenizer, directory / "at_the_end")


def export_run(run: Path, out: Path, *options: str) -> str:
    """Export without the command, so that a failure shows its place."""
    assert run_export(parse_export_options([str(run), "--out", str(out), *options])) == 0
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    return str(out)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(320, (2, 24), generator=generator)
    return model.eval()(input_ids=ids).logits


def plain(directory: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def adapted(base: Path, adapter: Path | str) -> Any:
    return PeftModel.from_pretrained(plain(base), str(adapter))


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def same_tensors(first: Path, second: Path, file: str) -> bool:
    ours, theirs = load_file(first / file), load_file(second / file)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.line("export")
@pytest.mark.parametrize("name", ["lora", "ia3", "vera"])
def test_an_adapter_and_the_merged_model_give_the_same_logits_in_plain_transformers(
    runs: Path,
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    adapter = export_run(runs / name / "run", tmp_path / "adapter")
    assert same_tensors(
        tmp_path / "adapter", runs / name / "at_the_end", "adapter_model.safetensors"
    )
    merged = export_run(runs / name / "run" / "checkpoints" / STEP, tmp_path / "merged", "--merge")
    told = capsys.readouterr().out
    assert told.count(f"{STEP}, whose files are as they were written") == 2
    assert told.count("verified: on 16 tokens its logits, computed in float64, differ from") == 2
    assert "rounding its weights" not in told
    theirs = logits(adapted(runs / "base", adapter))
    difference = distance(logits(plain(merged)), theirs)
    record_property("measured", f"{name}: {difference:.1e}")
    assert difference <= TOLERANCE
    assert (
        distance(logits(plain(runs / "base")), theirs) > 100 * TOLERANCE
    )  # training makes a difference
    assert AutoTokenizer.from_pretrained(merged)("red green")["input_ids"]


@pytest.mark.line("export")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # peft's
def test_a_head_that_was_trained_apart_from_its_twin_is_not_tied_any_more(
    runs: Path, tmp_path: Path
) -> None:
    adapter = export_run(runs / "head" / "run", tmp_path / "adapter")
    merged = export_run(runs / "head" / "run", tmp_path / "merged", "--merge")
    assert (
        json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
        is False
    )
    model = plain(merged)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert distance(logits(model), logits(adapted(runs / "tied", adapter))) <= TOLERANCE


@pytest.mark.line("export")
def test_a_whole_model_is_what_training_itself_exports(runs: Path, tmp_path: Path) -> None:
    out = export_run(runs / "full" / "run", tmp_path / "model")
    assert same_tensors(tmp_path / "model", runs / "full" / "at_the_end", "model.safetensors")
    assert torch.equal(logits(plain(out)), logits(plain(runs / "full" / "at_the_end")))


def test_weights_that_the_run_made_itself_are_in_the_merged_model(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(runs / "random" / "run"), "--out", str(tmp_path / "adapter")]
    assert main(arguments) == 2
    assert "(model.config), and no file has those; add --merge" in capsys.readouterr().err
    plain(export_run(runs / "random" / "run", tmp_path / "merged", "--merge"))


def test_weights_are_merged_before_they_are_rounded_and_files_have_a_limit(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, limit = runs / "bf16" / "run", "--max-file-size=25KB"
    rounded = export_run(run, tmp_path / "bf16", "--merge", limit)
    assert "rounding its weights to their format changes them by" in capsys.readouterr().out
    exact = export_run(run, tmp_path / "fp32", "--merge", "--dtype=float32")
    files = sorted((tmp_path / "bf16").glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 30_000 for file in files)
    ours, theirs = plain(rounded).state_dict(), plain(exact).state_dict()
    assert all(torch.equal(ours[n], theirs[n].bfloat16().float()) for n in theirs)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("arguments", [{"use_dora": True}, {"use_rslora": True}, {"bias": "all"}])
def test_a_merged_weight_is_what_peft_makes_of_it(
    model_directory: Path, arguments: dict[str, Any]
) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **arguments)
    model: Any = peft.get_peft_model(plain(model_directory), config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.uniform_(0.1, 0.5)
    merged = MergedWeights(model, lambda name: model.state_dict()[name])
    names = list(plain(model_directory).state_dict())
    ours = {name: merged.read(name).clone() for name in names}
    theirs = model.merge_and_unload().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in names)


def refused(run: Path, out: Path, *options: str) -> None:
    before = {path.name for path in out.parent.iterdir() if not path.name.isdecimal()}
    assert main(["export", str(run), "--out", str(out), *options]) in (1, 2)
    left = {path.name for path in out.parent.iterdir() if not path.name.isdecimal()}
    assert left == before, "nothing stays"  # but for processes in /proc


def test_what_cannot_be_exported_is_said_before_anything_is_written(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file, full = runs / "lora" / "run", tmp_path / "file", tmp_path / "full"
    file.touch()
    full.mkdir()
    (full / "x").touch()
    mistakes: list[tuple[tuple[Any, ...], str]] = [
        ((run, file), "which is a file; name a directory."),
        ((run, full), "which is not empty; name another directory."),
        ((tmp_path / "none", tmp_path / "out"), "there is no run"),
        ((tmp_path, tmp_path / "out"), "has no checkpoint in checkpoints/"),
        ((run, tmp_path / "out", "--dtype=float32"), "--dtype is of whole models; leave it out"),
        ((run, tmp_path / "out", "--dtype=int8"), "must be float32 or bfloat16."),
        ((run, tmp_path / "out", "--marge"), "export has no option '--marge'; did you mean"),
        (
            (run, tmp_path / "out", "--max-file-size=big"),
            "--max-file-size: 'big' is not a number of bytes",
        ),
        ((runs / "full" / "run", tmp_path / "out", "--merge"), "trained no adapter; leave it out"),
        ((run, tmp_path / "out", "--model.name_or_path=/nowhere/x/y"), "model.name_or_path is"),
        ((run, Path("/proc/out")), "cannot export to"),
        ((run, Path("/proc")), "where a file system is mounted and cannot be replaced; name a"),
    ]
    for arguments, message in mistakes:
        refused(*arguments)
        assert message in capsys.readouterr().err
    assert main(["export", str(run)]) == 2
    assert (
        "export needs one run and where to write: thunder-memsave export" in capsys.readouterr().err
    )
    assert main(["export", str(run), "--out"]) == 2
    assert "--out needs a value" in capsys.readouterr().err
    assert main(["export", "--help"]) == 0
    assert "--max-file-size" in capsys.readouterr().out


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    """A run that can be damaged, and its base."""
    shutil.copytree(runs / "lora" / "run", tmp_path / "run")
    shutil.copytree(runs / "base", tmp_path / "base")
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace(str(runs / "base"), str(tmp_path / "base")))
    return tmp_path


def test_a_damaged_checkpoint_and_another_model_are_refused(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = copied / "run", copied / "out"
    file = run / "checkpoints" / STEP / "state" / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"x")
    refused(run, out)
    error = capsys.readouterr().err
    assert "is damaged: state/__1_0.distcp has the SHA-256" in error
    assert "Name another checkpoint, if there is a copy." in error
    file.write_bytes(content)

    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("r: 4", "r: 5"))
    refused(run, out)
    error = capsys.readouterr().err
    assert (
        "holds another model than the run file beside it and its base describe, in 28 places"
        in error
    )
    assert "lora_A.default.weight: float32 [4, 32], trained -> float32 [5, 32], trained" in error
    (run / "config.yaml").write_text(text)

    weights = load_file(copied / "base" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, copied / "base" / "model.safetensors", metadata={"format": "pt"})
    refused(run, out)
    assert "was trained on other frozen weights than those of model.name" in capsys.readouterr().err

    (run / "config.yaml").unlink()
    refused(run, out)
    assert "which says what was trained; copy the whole output_dir." in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_stays_of_an_export_that_ends_early(
    runs: Path,
    tmp_path: Path,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(path: Path) -> None:
        assert path.stat().st_size > 0
        raise error

    monkeypatch.setattr(safetensors_files, "sync_file", fail)
    code = main(["export", str(runs / "lora" / "run"), "--out", str(tmp_path / "out"), "--merge"])
    assert list(tmp_path.iterdir()) == []
    if isinstance(error, OSError):
        assert code == 2
        assert "No space left on device; nothing was written. Correct" in capsys.readouterr().err
    else:
        assert code == 130


@pytest.mark.parametrize("options", [(), ("--merge",)])
def test_a_disk_that_is_full_for_safetensors_is_one_message(
    options: tuple[str, ...],
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: object, **more: object) -> None:
        # As safetensors 0.7 raises on a full disk; it is no OSError.
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(peft.peft_model if not options else safetensors_files, NAMES[options], fail)
    refused(runs / "lora" / "run", tmp_path / "out", *options)
    error = capsys.readouterr().err
    assert f"cannot export to {tmp_path / 'out'}: [Errno 28] I/O error: No space left" in error
    assert "nothing was written. Correct that, or name another directory by --out." in error


def test_a_base_that_cannot_be_read_is_not_blamed_on_where_the_export_is_written(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(source: SafetensorsSource, name: str, rows: slice | None = None) -> Tensor:
        if rows is None:
            raise SafetensorError("I/O error: Input/output error (os error 5)")
        return read(source, name, rows)

    read = SafetensorsSource.read
    monkeypatch.setattr(SafetensorsSource, "read", fail)
    refused(runs / "lora" / "run", tmp_path / "out", "--merge")
    error = capsys.readouterr().err
    assert f"of {runs / 'base'}: Input/output error" in error.replace("I/O error: ", "")
    assert "nothing was exported. See that its files are there and can be read, and export" in error


def test_every_file_is_on_the_disk_before_the_export_has_its_name(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    for name, options in (("adapter", ()), ("merged", ("--merge",))):
        export_run(runs / "lora" / "run", tmp_path / name, *options)
        written = list((tmp_path / name).rglob("*"))
        assert len(written) > 1
        assert {path.stat().st_ino for path in (tmp_path / name, *written)} <= synced


def test_a_wrong_export_is_found_and_does_not_stay(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, out = runs / "lora" / "run", tmp_path / "out"

    def spoil(tensors: dict[str, Tensor], path: Path, **more: Any) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * (1 + 1e-6)
        save_file(tensors, path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_files, "save_file", spoil)
        refused(run, out, "--merge")
    assert "the weight 'model.norm.weight' in the files is not the one" in capsys.readouterr().err

    def forget_alpha(model: nn.Module, directory: Path) -> nn.Module:
        file = directory / "adapter_config.json"
        file.write_text(file.read_text().replace('"lora_alpha": 16', '"lora_alpha": 17'))
        return real_load(model, directory)

    real_load = verified_export._with_adapter
    with monkeypatch.context() as patch:
        patch.setattr(verified_export, "_with_adapter", forget_alpha)
        refused(run, out)
    assert "the logits of the exported files differ from those of" in capsys.readouterr().err

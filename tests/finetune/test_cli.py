from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.language_model import run_values, write_run_file
from thunder_memsave import __version__
from thunder_memsave.checkpoints import CheckpointError, StateMismatchError
from thunder_memsave.checkpoints.manifest import Manifest, write_manifest
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.distributed.restart_store import StartError
from thunder_memsave.errors import (
    BudgetError,
    CaptureError,
    CompileError,
    PlanError,
    ThunderMemsaveError,
)
from thunder_memsave.fabric.nonfinite import NonfiniteGradientsError
from thunder_memsave.finetune import cli
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.run.job import prepare
from thunder_memsave.finetune.run.resume import base_files
from thunder_memsave.finetune.run_file.keys.key_help import key_helps
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.finetune.run_file.shipped import shipped_configs
from thunder_memsave.measure.step_memory import StepMemoryError
from thunder_memsave.planner.order import OrderError


@pytest.fixture
def run_file(tmp_path: Path, model_directory: Path) -> Path:
    return write_run_file(tmp_path, run_values(tmp_path, model_directory))


def test_without_arguments_the_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.count("usage: thunder-memsave train CONFIG") == 2


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"thunder-memsave {__version__}\n"


@pytest.mark.parametrize("command", ["train", "validate"])
def test_the_help_of_a_command_explains_every_key(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    captured = capsys.readouterr().out
    text = " ".join(captured.split())
    for each in key_helps():
        assert f"--{each.key} [" in text
    assert "--train.max_grad_norm [a number or null; default 1.0] Norm to which" in text
    assert "--strategy.sharding ['none' or 'zero2'; default zero2] `none` keeps" not in text
    assert "--strategy.timeout [a duration; default 30min] Longest wait of a collective" in text
    assert max(map(len, captured.splitlines())) <= 130


def test_the_help_of_configs_explains_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 2
    assert main(["configs", "--help"]) == 0
    assert capsys.readouterr().out.count("thunder-memsave configs copy NAME [DESTINATION]") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "there is no command 'trian'; did you mean 'train'?"),
        (
            ["train"],
            "train needs a run file first: thunder-memsave train CONFIG [--key=value ...].",
        ),
        (["validate", "--train.max_steps=3"], "validate needs a run file first"),
        (["train", "--config", "run.yaml"], "the run file has no option before it; write thunder-"),
        (["train", "missing.yaml"], "there is no run file missing.yaml."),
        (["train", "here/tiny_lor.yaml"], "there is no run file here/tiny_lor.yaml; did you mean"),
        (["train", "tiny_lor"], "no shipped one of that name; did you mean 'tiny_lora'? `thunder-"),
        (["train", "."], ". is a directory; name the YAML file itself."),
        (["configs", "lst"], "'configs lst' is not a command."),
        (["configs", "copy"], "'configs copy' is not a command."),
        (["configs", "show", "tiny"], "there is no shipped configuration 'tiny'; did you mean 'ti"),
        (["configs", "copy", "tiny_lora", "no/where"], "the directory no does not exist; make it"),
        (["configs", "copy", "tiny_lora", "/proc/x.yaml"], "cannot write /proc/x.yaml: "),
    ],
)
def test_a_mistake_in_the_arguments_gives_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_shipped_configurations_are_listed_with_their_first_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["configs", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_configs())
    (tiny,) = [line for line in lines if line.startswith("tiny_lora ")]
    assert re.fullmatch(r"tiny_lora +\S.* with LoRA .*\.", tiny)


def test_a_shipped_configuration_is_shown_and_copied_but_never_over_another_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shipped_configs()["tiny_lora"].read_text()
    assert main(["configs", "show", "tiny_lora.yaml"]) == 0
    assert capsys.readouterr().out == text
    (tmp_path / "into").mkdir()
    for destination in ([], ["mine.yaml"], ["into"]):
        assert main(["configs", "copy", "tiny_lora", *destination]) == 0
    assert capsys.readouterr().out.split() == ["tiny_lora.yaml", "mine.yaml", "into/tiny_lora.yaml"]
    assert (tmp_path / "into" / "tiny_lora.yaml").read_text() == text
    copied = (tmp_path / "mine.yaml").read_text()
    assert copied == text.replace("output_dir: runs/tiny_lora", "output_dir: runs/mine") != text
    (tmp_path / "mine.yaml").write_text("mine")
    assert main(["configs", "copy", "tiny_lora", "mine.yaml"]) == 2
    assert "mine.yaml exists; name another file, or remove it." in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_a_shipped_configuration_runs_by_its_name_unless_a_file_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tiny_lora", "tiny_lora.yaml"):
        assert main(["validate", name, "--train.epochs=x"]) == 2
        error = capsys.readouterr().err
        # Without the directory of the package, also before a line number.
        assert error.startswith("error: tiny_lora.yaml cannot be used; 3 problems:\n")
        assert "\n  tiny_lora.yaml:18: model.name_or_path is 'runs/tiny" in error
    (tmp_path / "tiny_lora").write_text("- 1")
    assert main(["validate", "tiny_lora"]) == 2
    assert "error: tiny_lora cannot be used" in capsys.readouterr().err


def test_validate_says_that_few_steps_may_teach_nothing(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "may be too few to learn from; a smaller train.global_batch_size or more train.epochs"
    assert main(["validate", str(run_file), "--train.max_steps=null", "--train.epochs=1"]) == 0
    assert note in capsys.readouterr().out
    for enough in ("--train.epochs=100", "--train.max_steps=1"):
        assert main(["validate", str(run_file), "--train.max_steps=null", enough]) == 0
        assert note not in capsys.readouterr().out


def test_validate_says_what_would_run_and_writes_nothing(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run_file.parent.iterdir())
    overrides = ["--train.max_steps=9", "--train.gradient_accumulation_steps", "4"]
    assert main(["validate", str(run_file), *overrides]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0] == f"{run_file} is usable."
    facts = "\n".join(lines[2:])
    assert re.search(r"/model\d*, 4,096 of 43,168 parameters are trained \(9.49 %\)$", facts, re.M)
    assert re.search(
        r"^data: +train: 18 documents, \d+ target tokens in 18 rows of 32$", facts, re.M
    )
    assert re.search(r"^ +validation: 6 documents", facts, re.M)
    assert re.search(r"^batch: +4 rows per step = 1 row x 4 passes x 1 process; 128 t", facts, re.M)
    assert re.search(r"^steps: +9 = 1.8 epochs of 5 steps$", facts, re.M)
    assert re.search(rf"^writes to: {run_file.parent}/run/$", facts, re.M)
    assert re.search(r"is trained on:\n    \w+ \d+⟦ .*<end>⟧$", facts, re.M)
    assert sorted(run_file.parent.iterdir()) == before


def test_validate_counts_the_processes_as_train_does(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(run_file), "--devices=2"]) == 0
    assert "= 1 row x 2 passes x 2 processes;" in capsys.readouterr().out
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["validate", str(run_file)]) == 0
    assert "= 1 row x 1 pass x 4 processes;" in capsys.readouterr().out
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["validate", str(run_file)]) == 0
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    assert main(["validate", str(run_file), "--devices=3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    assert waited == [15.0]  # torchrun would end the process that reports


def test_validate_names_the_checkpoint_that_train_would_go_on_from(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run_file.parent / "run" / "checkpoints" / "step-00000003"
    job = prepare(load_run_config(run_file))
    values = {"step": 3, **job.identity, **base_files(job).identity}
    write_checkpoint_info(checkpoint, values=values)
    assert main(["validate", str(run_file), "--resume=auto"]) == 0
    assert f"\nstart:     {checkpoint}\n" in capsys.readouterr().out
    assert main(["validate", str(run_file), "--resume=auto", "--data.max_seq_length=30"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "was written with other settings than this run has, so it cannot resume from" in message
    assert f"contents of the rows {values['fingerprint_of_rows']} " in message
    assert "The rows follow from the data files, the tokenizer with its chat template" in message


@pytest.mark.parametrize(
    "error",
    [
        CaptureError("cannot capture forward"),
        CompileError("cannot compile forward"),
        CheckpointError("cannot save"),
        StateMismatchError("other names"),
        NonfiniteGradientsError("the step was not taken"),
        StartError("rank 1 never came"),
        BudgetError("it does not fit"),
    ],
)
def test_an_error_of_ours_in_a_run_is_one_message(
    error: ThunderMemsaveError,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_in_train(monkeypatch, error)
    assert main(["train", str(run_file)]) == (3 if isinstance(error, BudgetError) else 1)
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_defect_of_ours_keeps_its_traceback(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_train(monkeypatch, OrderError("cannot be recomputed"))
    with pytest.raises(OrderError, match="cannot be recomputed"):
        main(["train", str(run_file)])


def test_an_error_on_another_rank_is_one_line(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_in_train(monkeypatch, CaptureError("cannot capture\nmore about it"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")
    assert main(["train", str(run_file)]) == 1
    assert capsys.readouterr().err == "error on rank 5: cannot capture\n"


def test_a_device_without_memory_left_gives_advice(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...")
    fail_in_train(monkeypatch, error)
    assert main(["train", str(run_file)]) == 4
    assert capsys.readouterr().err == (
        "error: CUDA out of memory. To need less, use more processes with strategy.sharding zero3, a smaller "
        "train.micro_batch_size (train.global_batch_size stays), a smaller data.max_seq_length, or lora.\n"
    )


def test_a_library_without_memory_left_gives_advice_too(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    )
    fail_in_train(monkeypatch, error)
    assert main(["train", str(run_file)]) == 4
    said = capsys.readouterr().err
    assert said.startswith(
        "error: CUDA out of memory outside of PyTorch's allocator (CUBLAS_STATUS_ALLOC_FAILED). "
    )


def test_an_unexpected_error_keeps_its_traceback(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_train(monkeypatch, ValueError("a defect"))
    with pytest.raises(ValueError, match="a defect"):
        main(["train", str(run_file)])


def fail_in_train(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def train(config: object, *, prints_plan: bool) -> None:
        raise error

    monkeypatch.setattr("thunder_memsave.finetune.run.train.train", train)
    # The handler of Ctrl-C would change, and the tests' own is to stay.
    monkeypatch.setattr("thunder_memsave.finetune.cli.watch_signals", lambda: None)


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "thunder_memsave", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before anything is written
        assert process.stderr.read() == b""
    assert process.returncode == 141  # 128 + SIGPIPE, as shells report it


def test_help_and_lists_do_not_wait_for_torch() -> None:
    script = (
        "import sys; from thunder_memsave.finetune.cli import main; main(['configs', 'list']); "
        "main(['train', '--help']); sys.exit('torch' in sys.modules)"
    )
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run(
        [sys.executable, "-c", script], check=True, env=environment, stdout=subprocess.DEVNULL
    )


def test_packing_is_refused_for_a_sliding_window_that_it_would_widen(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "mistral",
        "sliding_window": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
    }
    model = {"config": config, "attn_implementation": "eager"}
    values = run_values(tmp_path, model_directory, model=model, data={"packing": True})
    assert main(["train", str(write_run_file(tmp_path, values))]) == 2
    assert "the model's sliding window of 8 tokens" in capsys.readouterr().err


def test_weights_that_cannot_be_read_are_refused_before_anything_is_written(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(model_directory, tmp_path / "broken")
    content = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[:100])  # an interrupted download
    path = write_run_file(tmp_path, run_values(tmp_path, broken))
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(r"model.safetensors is damaged or cut short \(.*invalid header", error)
    assert not (tmp_path / "run").exists()


def test_a_directory_with_files_in_it_is_refused_and_kept(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    assert main(["train", str(path)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_files_that_are_no_run_are_not_mixed_with_one_that_resumes(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    elsewhere = tmp_path / "other" / "checkpoints" / "step-00000001"
    write_checkpoint_info(elsewhere, values={"step": 1})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    for resume in ("auto", str(elsewhere)):
        assert main(["train", str(path), f"--resume={resume}"]) == 2
        assert "exists and is not empty" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_a_checkpoint_that_cannot_be_read_is_named(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    assert main(["train", str(path), f"--resume={checkpoint}"]) == 2
    message = f"{checkpoint} is damaged, or no checkpoint: manifest.sha256 is missing; resume from"
    assert message in " ".join(capsys.readouterr().err.split())
    (checkpoint / "checkpoint.json").write_text("{}")
    assert main(["train", str(path), "--resume=auto"]) == 2
    message = "was written without a manifest.json by a version of this package before its first"
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"optimizer_class": "SGD"},
            "key checkpoint this run optimizer.class_path SGD AdamW train.seed null 42 train.global",
        ),
        (
            {"optimizer_class": "AdamW", "seed": 1},
            "key checkpoint this run train.seed 1 42 train.global_batch_size null 4 number of rows null",
        ),
        (
            {"optimizer_class": "AdamW", "seed": 42, "global_batch_size": 3},
            "key checkpoint this run train.global_batch_size 3 4 number of rows null",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path,
    model_directory: Path,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, int | str],
    message: str,
) -> None:
    path = write_run_file(tmp_path, run_values(tmp_path, model_directory))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    write_checkpoint_info(checkpoint, values={"step": 1, **values})
    assert main(["train", str(path), "--resume=auto"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def write_checkpoint_info(directory: Path, *, values: Mapping[str, int | str]) -> None:
    directory.mkdir(parents=True)
    manifest = Manifest(
        step=1,
        world_size=2,  # may be another
        sharding="none",
        versions={},
        values=values,
        tensors={},
        files={},
    )
    write_manifest(directory, manifest)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            BudgetError.no_plan(budget_bytes=5, smallest_bytes=9, bound_bytes=8),
            3,
            "error: the budget is 5 bytes, and",
        ),
        (
            StepMemoryError("the memory that X needs is not known"),
            1,
            "error: the memory that X needs",
        ),
        (
            PlanError("this rank runs other operations than rank 0"),
            1,
            "error: this rank runs other",
        ),
    ],
)
def test_what_a_plan_cannot_do_is_told_without_a_traceback(
    error: Exception,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(cli._COMMANDS, "train", partial(_raise, error))
    assert main(["train", "x.yaml"]) == code
    assert capsys.readouterr().err.startswith(text)


def test_a_rank_that_only_heard_of_an_error_lets_the_other_one_end_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun would end the process that reports and cleans up."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for error in (OtherRankError("rank 0 failed"), CaptureError("no graph")):
        monkeypatch.setitem(cli._COMMANDS, "train", partial(_raise, error))
        assert main(["train", "x.yaml"]) == 1
    assert waited == [15.0]
    assert "rank 0 failed" in capsys.readouterr().err


def test_ctrl_c_in_a_plan_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli._COMMANDS, "plan", partial(_raise, KeyboardInterrupt()))
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert main(["plan", "x.yaml"]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert capsys.readouterr().err == "interrupted.\n"


def _raise(error: BaseException, arguments: list[str]) -> int:
    raise error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["plan", "llama3_8b_lora", "--wold-size", "8"],
            "plan has no option '--wold-size'; did you mean '--world-size'",
        ),
        (
            ["plan", "llama3_8b_lora", "--format"],
            "plan has no option '--format'; did you mean '--formats'",
        ),
        (
            ["train", "llama3_8b_lora", "--verbos"],
            "train has no option '--verbos'; did you mean '--verbose'",
        ),
    ],
)
def test_a_misspelt_option_is_no_key(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err

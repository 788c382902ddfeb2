"""`thunder-memsave chat` answers with what a run trained, finished or not, and tells kindly what it cannot use."""

from __future__ import annotations

import io
import shutil
import signal
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.language_model import run_values, write_model, write_run_file
from harness.unsteady_store import unsteady_store
from thunder_memsave.callbacks.copies import CheckpointCopies
from thunder_memsave.finetune.chat import answering
from thunder_memsave.finetune.cli import main


def said(*arguments: object, typed: str | None = None) -> tuple[int, str, str]:
    """Run the command; return its exit code and what it printed."""
    output, errors = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr("sys.stdin", io.StringIO(typed or ""))
        code = main([*map(str, arguments)])
    signal.signal(signal.SIGINT, handler)
    return code, output.getvalue(), errors.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of LoRA on prompts; its last line is `try it: ...`."""
    directory = tmp_path_factory.mktemp("chat")
    values = run_values(
        directory,
        write_model(directory / "model", num_hidden_layers=1),
        train={"max_steps": 1},
        checkpoint={"every_n_steps": 1},
    )
    del values["data"]["dataset"]["init_args"]["val_fraction"]
    code, output, errors = said("train", write_run_file(directory, values))
    assert code == 0, errors
    root = directory / "run"
    assert output.splitlines()[-1] == f"try it: thunder-memsave chat {root}"
    return root


def expected(run: Path, text: str) -> str:
    """Generate the most probable 8 tokens in plain transformers and peft."""
    base = AutoModelForCausalLM.from_pretrained(run.parent / "model")
    model: Any = PeftModel.from_pretrained(base, run / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


SHORT = ("--temperature=0", "--max-new-tokens=8")


def test_an_answer_is_that_of_transformers_and_peft(run: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a user would see it within the answer
        code, output, errors = said("chat", run, "--prompt=red green", *SHORT)
    assert (code, errors) == (0, "")
    assert output.strip() == expected(run, "red green").strip()
    assert output.strip()


def test_a_run_at_an_address_answers_from_its_export_or_its_newest_checkpoint(run: Path) -> None:
    address = "unsteady://bucket/run"
    with unsteady_store() as store:
        copies = CheckpointCopies(run / "checkpoints", address, beside=[run / "config.yaml"])
        copies.finish(run / "adapter")
        code, output, errors = said("chat", address, "--prompt=red green", *SHORT)
        assert (code, errors) == (0, "")
        first, _, answer = output.partition("\n")
        assert first == f"copying {address}/adapter"
        assert answer.strip() == expected(run, "red green").strip()
        for name in [name for name in store.store if "/adapter/" in name]:
            del store.store[name]
        code, output, errors = said("chat", address, "--prompt=red green", *SHORT)
        assert (code, errors) == (0, "")
        assert output.startswith(f"copying {address}/checkpoints/step-00000001 to ")
        assert output.strip().endswith(expected(run, "red green").strip())
        code, _, errors = said("chat", "unsteady://bucket/other", "--prompt=red", *SHORT)
        assert code == 2
        assert "there is no whole checkpoint at unsteady://bucket/other." in errors
        code, _, errors = said("chat", "cloud9://bucket/run")
        assert code == 2
        assert "RUN is 'cloud9://bucket/run', but fsspec knows no protocol 'cloud9'" in errors


def test_a_run_without_an_export_answers_from_its_checkpoint(run: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "run"
    shutil.copytree(run, stopped, ignore=shutil.ignore_patterns("adapter"))
    code, output, errors = said("chat", stopped, "--prompt=red green", *SHORT)
    assert (code, errors) == (0, "")
    first, *_, last = output.strip().splitlines()
    assert first.startswith(f"exporting {stopped}/checkpoints/step-00000001")
    assert last.strip() == expected(run, "red green").strip().splitlines()[-1]
    assert not (stopped / "adapter").exists()


def test_a_newer_checkpoint_is_preferred_to_an_older_export(run: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(run, resumed)
    (resumed / "checkpoints" / "step-00000001" / "manifest.json").touch()
    assert said("chat", resumed, "--prompt=red", *SHORT)[1].startswith("exporting ")
    assert not said("chat", run, "--prompt=red", *SHORT)[1].startswith("exporting ")


def test_the_base_may_have_moved(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run.parent / "model", tmp_path / "moved")
    config = tmp_path / "run" / "config.yaml"
    shutil.copytree(run, config.parent)
    adapter = shutil.copytree(run / "adapter", tmp_path / "alone")
    for file in (config, adapter / "adapter_config.json"):
        file.write_text(file.read_text().replace(str(run.parent / "model"), "/nowhere/model"))
    for path in (config.parent, adapter):
        code, _, errors = said("chat", path, "--prompt=red green", *SHORT)
        assert code == 2
        assert "/nowhere/model" in errors
        more = ("--prompt=red green", "--plain", f"--model.name_or_path={moved}")
        code, output, errors = said("chat", path, *more, *SHORT)
        assert (code, errors) == (0, "")
        assert output.strip() == expected(run, "red green").strip()


def test_lines_are_a_conversation_in_the_chat_template(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def answer(self: answering.Answering, messages: list[answering.Message]) -> str:
        asked.append([f"{each['role']} {each['content']}" for each in messages])
        return str(len(asked))

    monkeypatch.setattr(answering.Answering, "answer", answer)
    # Of an adapter by itself nothing is known but the template.
    adapter = shutil.copytree(run / "adapter", run.parent / "alone")
    code, output, _ = said("chat", adapter, "--system=S", typed="one\n\n two \n/new\nthree\n")
    assert code == 0
    assert "messages are rendered by the chat template" in output
    assert asked == [
        ["system S", "user one"],
        ["system S", "user one", "assistant 1", "user two"],
        ["system S", "user three"],
    ]
    code, output, _ = said("chat", run, typed="one\n")
    assert "what you type is continued as a text, as in training" in output


def test_a_tokenizer_without_a_template_continues_what_is_typed(run: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(run / "adapter", tmp_path / "alone")
    (adapter / "chat_template.jinja").unlink()
    code, output, errors = said("chat", adapter, *SHORT, typed="red green\n")
    assert (code, errors) == (0, "")
    assert "the tokenizer has no chat template: what you type is continued as a text" in output
    assert output.strip().endswith(expected(run, "red green").strip())
    code, _, errors = said("chat", adapter, "--system=S")
    assert code == 2
    assert "--system needs a chat template, and the tokenizer has none" in errors


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def interrupted(self: Any, messages: Any) -> str:
        calls.append([each["content"] for each in messages])
        if len(calls) == 1:
            raise KeyboardInterrupt
        return "answer"

    monkeypatch.setattr(answering.Answering, "answer", interrupted)
    code, output, errors = said("chat", run / "adapter", typed="one\ntwo\n")
    assert (code, errors) == (0, "")
    assert "(stopped; this message is not remembered)" in output
    assert calls == [["one"], ["two"]]


def test_a_conversation_beyond_the_models_positions_is_told(run: Path) -> None:
    code, output, errors = said("chat", run, *SHORT, typed=f"{'red ' * 300}\nred\n")
    assert code == 0
    assert "tokens, and the model takes 128 with the answer; /new begins another" in errors
    assert output.strip().endswith(expected(run, "red").strip())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "chat needs one run: thunder-memsave chat RUN"),
        (["a", "b"], "chat needs one run"),
        (
            ["nowhere"],
            "there is no directory nowhere; the newest runs there: begun. A run file names",
        ),
        (["no/where"], "there is no directory no/where; name the output_dir of a run"),
        (["{empty}"], "{empty} is no run: it has no config.yaml, adapter_config.json or weights"),
        (["{begun}"], "{begun} has no checkpoint in checkpoints/"),
        (["{broken}"], "does not name the adapter's base model"),
        (["{run}", "--temperatur=1"], "chat has no option '--temperatur'; did you mean"),
        (["{run}", "--temperature=-1"], "--temperature is '-1', but must be a number of at least"),
        (["{run}", "--max-new-tokens=0"], "--max-new-tokens is '0', but must be a whole number"),
        (["{run}", "--plain", "--system=S"], "leave it or --plain out"),
    ],
)
def test_what_cannot_be_used_is_one_message(
    arguments: list[str], told: str, run: Path, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("empty", "begun", "broken")} | {"run": run}
    for name in ("empty", "begun", "broken"):
        places[name].mkdir()
    shutil.copy(run / "config.yaml", places["begun"])
    (places["broken"] / "adapter_config.json").write_text("{}")
    code, output, errors = said("chat", *(word.format(**places) for word in arguments))
    assert (code, output) == (2, "")
    assert told.format(**places) in errors
    assert "Traceback" not in errors

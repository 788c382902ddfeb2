"""What the documentation shows is what the program takes."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, is_typeddict

import fsspec
import peft
import pytest
import yaml

from thunder_memsave import callbacks
from thunder_memsave.callbacks.hooks import HOOKS
from thunder_memsave.finetune.chat.options import parse_chat_options
from thunder_memsave.finetune.export.export_command import parse_export_options
from thunder_memsave.finetune.model.adapters import _METHODS
from thunder_memsave.finetune.plan.plan_command import parse_options
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.keys.foreign_names import FOREIGN_NAMES
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.settings.schema import bare, hints_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs/decisions").glob("*.md"))]
SHIPPED = {path.stem: path for path in Path(str(files("thunder_memsave.configs"))).glob("*.yaml")}

# What a page's fragment of a run file is a fragment of.
BASE: dict[str, Any] = {
    "model": {"name_or_path": "/models/mine"},
    "lora": {"r": 16},
    "data": {"dataset": {"class_path": "ChatJSONL", "init_args": {"path": "train.jsonl"}}},
    "output_dir": "runs/mine",
}

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
DOTTED_KEY = re.compile(r"[a-z_]+(\.[a-z_]+)+")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def all_blocks(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, language))
    ]


def commands(page: Path) -> Iterator[str]:
    """Yield the command lines of fenced and of indented blocks, continued lines joined."""
    indented = re.sub(FENCE, "", page.read_text())
    lines = [line.strip() for line in indented.splitlines() if line.startswith("    ")]
    for text in (*blocks(page, "bash"), "\n".join(lines)):
        for line in text.replace("\\\n", " ").splitlines():
            if "thunder-memsave " in line.partition("#")[0]:
                yield line.partition("#")[0].strip()


def all_commands() -> list[Any]:
    found = [(page.stem, command) for page in PAGES for command in commands(page)]
    return [pytest.param(command, id=f"{stem}-{i}") for i, (stem, command) in enumerate(found)]


def merged(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in values.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        both[key] = merged(base[key], value) if nested and key != "dataset" else value
    return both


def run_file(directory: Path, values: dict[str, Any]) -> Path:
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def own_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that docs/callbacks.md tells to write."""
    (code,) = blocks(ROOT / "docs/callbacks.md", "python")
    (tmp_path / "my_callbacks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """A protocol that is known here without its package."""
    registry = sys.modules[fsspec.get_filesystem_class.__module__]
    monkeypatch.setitem(registry._registry, "s3", fsspec.get_filesystem_class("memory"))


@pytest.mark.usefixtures("own_callbacks", "s3")
@pytest.mark.parametrize("block", all_blocks("yaml"))
def test_a_yaml_block_is_a_run_file_or_a_part_of_one(block: str, tmp_path: Path) -> None:
    load_run_config(run_file(tmp_path, merged(BASE, yaml.safe_load(block))), [])


@pytest.mark.parametrize("command", all_commands())
def test_a_command_line_is_one_that_the_program_takes(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    program = words.index("thunder-memsave")
    verb, *arguments = words[program + 1 :]
    if program and "torchrun" in words:
        assert words[program - 1] == "--no-python"
    if verb == "--version":
        return
    if verb == "configs":
        assert arguments[0] in ("list", "show", "copy")
        assert set(arguments[1:2]) <= SHIPPED.keys()
        return
    if verb == "export":
        parse_export_options([a for a in arguments if not a.startswith("[")])
        return
    if verb == "chat":
        parse_chat_options(arguments)
        return
    assert verb in ("train", "validate", "plan")
    if verb == "plan":
        _, arguments = parse_options(arguments)
    config, *overrides = arguments
    if config == "--help":
        return
    assert config in SHIPPED or config.endswith(".yaml")
    load_run_config(SHIPPED.get(config) or run_file(tmp_path, BASE), overrides)


@pytest.mark.parametrize("block", all_blocks("python"))
def test_a_python_block_compiles(block: str) -> None:
    compile(block, "<documentation>", "exec")


@pytest.mark.parametrize("page", LINKING, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_keys_in_the_text_exist(page: Path) -> None:
    sections = {field.name for field in dataclasses.fields(RunConfig)}
    for span in CODE_SPAN.findall(re.sub(FENCE, "", page.read_text())):
        key = span.removeprefix("--").partition(":")[0].partition("=")[0].rstrip(".")
        if DOTTED_KEY.fullmatch(key) and key.split(".")[0] in sections:
            assert exists(key) or not_a_key(span), span


def not_a_key(span: str) -> bool:
    return span.endswith((".yaml", ".jsonl", ".json", ".py"))


def exists(key: str) -> bool:
    section, *rest = key.split(".")
    if section == "lora":
        return rest[0] in {field.name for field in dataclasses.fields(peft.LoraConfig)}
    hint = bare(hints_of(RunConfig)[section])
    for position, part in enumerate(rest):
        if not dataclasses.is_dataclass(hint):
            return is_typeddict(hint) and rest[position] in hints_of(hint)
        if part not in hints_of(hint):
            return False
        hint = bare(hints_of(hint)[part])
    return True


def test_a_key_that_does_not_exist_would_be_noticed() -> None:
    assert exists("train.epochs")
    assert exists("data.dataset.init_args.path")
    assert not exists("train.epoch")
    assert not exists("lora.rank")


def test_every_name_that_we_give_for_another_tools_key_is_a_key_of_ours() -> None:
    top_level = {field.name for field in dataclasses.fields(RunConfig)} | {"class_path"}
    for name_there, foreign in FOREIGN_NAMES.items():
        for key in foreign.here:
            assert key in top_level or exists(key), f"{name_there} -> {key}"


def test_generated_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.pages().items():
        assert path.read_text() == text, f"run docs/generate.py: {path.name} is out of date"


def test_the_page_on_callbacks_lists_those_that_there_are() -> None:
    text = (ROOT / "docs/callbacks.md").read_text()
    listed = set(re.findall(r"^\| `([A-Z]\w+)` \|", text, re.MULTILINE))
    assert listed == set(callbacks.__all__) - {"CallbackStates", "TrainingControl", "TrainingHooks"}


def test_the_page_on_callbacks_lists_the_hooks_and_their_arguments() -> None:
    text = (ROOT / "docs/callbacks.md").read_text()
    rows = re.findall(r"^\| `(on_\w+)` \| (.*) \|$", text, re.MULTILINE)
    listed = {hook: tuple(CODE_SPAN.findall(arguments)) for hook, arguments in rows}
    assert listed == dict(HOOKS)


def test_the_adapters_that_the_docs_name_are_those_that_can_be_used() -> None:
    text = (ROOT / "docs/fine_tune_on_my_data.md").read_text()
    (named,) = re.findall(r"LoRA with rank stabilisation too, ([^.]*)\.", text)
    words = {word.upper() for word in re.findall(r"\w+", named)} - {"AND"}
    assert words == {name.removesuffix("Config").upper() for name in _METHODS} - {"LORA"}


def test_the_whole_script_trains_on_two_processes_and_saves(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(blocks(ROOT / "docs/strategy.md", "python")[0])
    result = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[1]) for line in re.findall(r"^\d+ \S+$", result.stdout, re.M)]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoint").exists()


def test_the_whole_script_is_short() -> None:
    assert len(blocks(ROOT / "docs/strategy.md", "python")[0].splitlines()) < 40


def test_the_run_file_of_the_page_on_data_is_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(blocks(ROOT / "docs/fine_tune_on_my_data.md", "yaml")[0])
    config = load_run_config(path, [])
    assert config.lora is not None
    assert config.lora["r"] == 16


def test_files_that_the_text_names_exist() -> None:
    missing = [
        f"{name(page)}: {span}"
        for page in LINKING
        for span in CODE_SPAN.findall(re.sub(FENCE, "", page.read_text()))
        if re.fullmatch(r"[\w./]+\.py", span) and not exists_in_the_tree(span)
    ]
    assert missing == []


def exists_in_the_tree(file: str) -> bool:
    return (ROOT / file).is_file() or file in ("__init__.py", "my_callbacks.py")


def test_every_page_is_linked_from_the_readme() -> None:
    linked = LINK.findall((ROOT / "README.md").read_text())
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(linked)

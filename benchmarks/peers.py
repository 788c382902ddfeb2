"""Time and memory of a training step through the tools that people use now, and through ours, on one CPU thread.

    make peers                                    # all settings, about two hours of one core
    python benchmarks/peers.py --only 'small full 16384' --save benchmarks/results/peers_DATE_cpu

Hugging Face's Trainer (also with `torch_compile`), TRL's SFTTrainer, each with and without gradient checkpointing, and
a Lightning Fabric script train the same model on the same rows as `thunder-memsave train` does (`peer_runs.py`). Ours
runs without a budget, and with budgets below the peak that it has then. With `--litgpt PATH`, a checkout of
Lightning-AI/litgpt, its scripts run too (`peer_litgpt.py`). Each run is a process of its own; rounds are
interleaved, and the median of a step's CPU time counts, so that other programs on the machine slow none of them alone.

Bytes are those of tensors at the peak of a step, weights, gradients and optimizer states among them, as PyTorch's
allocator counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

import peer_runs
import torch
from peer_litgpt import VARIABLE
from transformers import LlamaConfig, LlamaForCausalLM

from thunder_memsave.configs.tiny import write_tokenizer

HERE = Path(__file__).parent
SIZES = {"small": (128, 4), "medium": (256, 6), "large": (512, 8)}
"""Width and layers."""
VOCABULARIES = (16_384, 131_072)
NUM_ROWS, LENGTH, NUM_STEPS = 4, 256, 10
NUM_TOKENS = 261
"""Of the tokenizer that is written; models have room for more, as they often do."""
FULL_LOSSES, LORA_LOSSES = 1e-4, 1e-2
"""Largest difference of losses after all steps; adapters start with other random numbers."""
OURS = "ours"
REFERENCE = "Lightning Fabric"
"""Losses are compared with its."""
ALL = (*peer_runs.TOOLS, OURS)
BUDGETS = (0.9, 0.8, 0.7)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, and what of it is trained."""

    size: str
    has_adapter: bool
    vocabulary: int

    @property
    def name(self) -> str:
        """Such as `small lora 16384`."""
        return f"{self.size} {'lora' if self.has_adapter else 'full'} {self.vocabulary}"

    def write(self, directory: Path) -> None:
        """Write the model, its tokenizer, the rows and the task."""
        width, num_layers = SIZES[self.size]
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=width,
            intermediate_size=width * 11 // 4 // 16 * 16,
            num_hidden_layers=num_layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 64,
            max_position_embeddings=LENGTH,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(directory / "model")
        write_tokenizer(directory / "model")
        rows = torch.randint(8, NUM_TOKENS, (NUM_ROWS, LENGTH)).tolist()
        lines = [json.dumps({"input_ids": row}) + "\n" for row in rows]
        (directory / "rows.jsonl").write_text("".join(lines))
        task = {
            "has_adapter": self.has_adapter,
            "num_rows": NUM_ROWS,
            "length": LENGTH,
            "num_steps": NUM_STEPS,
        }
        (directory / "task.json").write_text(json.dumps(task))


@dataclass
class Measured:
    """The runs of one tool in one setting."""

    first_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of the last run."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return median(self.steps_s)

    @property
    def peak_bytes(self) -> int:
        """The largest peak."""
        return max(self.peaks)


def main() -> None:
    """Measure all settings, and print and save a table."""
    arguments = _parser().parse_args()
    arguments.tools = [tool for tool in ALL if tool in (REFERENCE, *arguments.tools)]
    if arguments.litgpt is not None:
        os.environ[VARIABLE] = str(arguments.litgpt.resolve())
    else:
        arguments.tools = [tool for tool in arguments.tools if tool != peer_runs.LITGPT]
    chosen = [
        Setting(size=size, has_adapter=has_adapter, vocabulary=vocabulary)
        for vocabulary in VOCABULARIES
        for size in SIZES
        for has_adapter in (False, True)
    ]
    found: dict[str, Mapping[str, Measured]] = {}
    for setting in chosen:
        if arguments.only and setting.name not in arguments.only:
            continue
        found[setting.name] = _measured(
            setting, arguments.tools, arguments.budgets, num_rounds=arguments.rounds
        )
        print("\n".join(_lines(setting, found[setting.name])), flush=True)
        if arguments.save:
            _save(arguments.save, found, chosen, num_rounds=arguments.rounds)


def _measured(
    setting: Setting, tools: Sequence[str], budgets: Sequence[float], *, num_rounds: int
) -> Mapping[str, Measured]:
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        directory = Path(name)
        setting.write(directory)
        found: dict[str, Measured] = defaultdict(Measured)
        for _ in range(num_rounds):
            for tool in tools:
                _run(tool, directory, found[tool])
            for part in budgets if OURS in tools else ():
                budget = int(part * found[OURS].peaks[0])
                _run(OURS, directory, found[f"ours, budget: {part} of its peak"], budget=budget)
        return dict(found)


def _is_peer(tool: str) -> bool:
    return tool in peer_runs.TOOLS


def _run(tool: str, directory: Path, measured: Measured, *, budget: int | None = None) -> None:
    """Run a tool once; a budget that is refused leaves no numbers."""
    command = [sys.executable, str(HERE / "peer_runs.py"), tool, str(directory)]
    command += [] if budget is None else [str(budget)]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    seen = directory / "seen.json"
    seen.unlink(missing_ok=True)
    for old in directory.glob("of_*"):
        shutil.rmtree(old)
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if run.returncode == 3 and budget is not None:
        return
    if run.returncode or not seen.exists():
        raise RuntimeError(f"{tool} ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    values = json.loads(seen.read_text())
    measured.first_s.append(values["first_s"])
    measured.steps_s += values["steps_s"]
    measured.peaks.append(values["peak_bytes"])
    measured.losses = values["losses"]


def _lines(setting: Setting, found: Mapping[str, Measured]) -> list[str]:
    fastest = min(m.step_s for tool, m in found.items() if _is_peer(tool))
    reference = found[REFERENCE].losses
    limit = LORA_LOSSES if setting.has_adapter else FULL_LOSSES
    lines = [
        f"### {setting.name}",
        "",
        "| | step, s | to the fastest peer | first step, s | peak, MiB | largest difference of losses |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for tool, measured in found.items():
        if not measured.peaks:
            lines.append(f"| {tool} | does not fit | | | | |")
            continue
        difference = max(abs(a - b) for a, b in zip(measured.losses, reference, strict=True))
        mark = "" if difference <= limit else " (!)"
        lines.append(
            f"| {tool} | {measured.step_s:.3f} | {measured.step_s / fastest:.2f} | {median(measured.first_s):.1f} | "
            f"{measured.peak_bytes / MIB:,.0f} | {difference:.1e}{mark} |"
        )
    return [*lines, ""]


def _save(
    path: Path,
    found: Mapping[str, Mapping[str, Measured]],
    settings: Sequence[Setting],
    *,
    num_rounds: int,
) -> None:
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "peft", "lightning")
    )
    text = [
        "# A training step through other tools and through ours",
        "",
        f"{date.today()}, {platform.processor() or platform.machine()}, one thread, float32, Python "
        f"{platform.python_version()}, {versions}.",
        f"Llama, {NUM_ROWS} rows of {LENGTH} tokens, AdamW, clipping; interleaved rounds of {NUM_STEPS} steps: "
        f"{num_rounds}; medians of CPU time; bytes of tensors at a step's peak. `benchmarks/peers.py` says more.",
        "",
    ]
    by_name = {s.name: s for s in settings}
    for name, measured in found.items():
        text += _lines(by_name[name], measured)
    path.with_suffix(".md").write_text("\n".join(text))
    numbers = {name: {t: asdict(m) for t, m in each.items()} for name, each in found.items()}
    path.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare a training step with other tools'.")
    parser.add_argument(
        "--only", nargs="*", default=(), help="settings, such as 'small lora 16384'"
    )
    parser.add_argument(
        "--tools",
        nargs="*",
        choices=ALL,
        default=ALL,
        help=f"names of tools; all by default, and always {REFERENCE}",
    )
    parser.add_argument("--budgets", nargs="*", type=float, default=BUDGETS, help="parts of a peak")
    parser.add_argument("--litgpt", type=Path, help="a checkout of litgpt, to run its scripts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", type=Path, help="path of the table, without a suffix")
    return parser


if __name__ == "__main__":
    main()

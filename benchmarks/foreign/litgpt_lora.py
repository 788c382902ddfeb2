"""Runs litgpt's `finetune/lora.py` on a tiny random checkpoint, then its conversion to transformers' format."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

NUM_ROWS, NUM_WORDS = 40, 64
"""Rows of data, and words that the tokenizer knows besides the ends of rows."""
MERGED = Path("out") / "final" / "lit_model.pth"
CONVERTED = Path("hf") / "model.pth"
LORA = ("--lora_r=2", "--lora_alpha=4", "--lora_dropout=0.0", "--lora_mlp=true", "--lora_head=true")


def finetune(checkout: Path) -> None:
    """Train two steps of two micro-batches, evaluate, save, merge and convert, in the current folder."""
    sys.path.insert(0, str(checkout))
    from jsonargparse import CLI
    from litgpt.finetune import lora

    num_ranks, is_first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    if is_first:
        _write_checkpoint(Path("base"))
        _write_rows(Path("rows.json"))
    _wait_for(Path("rows.json"))
    sys.argv = [
        "lora.py",
        "base",
        "--out_dir=out",
        "--precision=32-true",
        f"--devices={num_ranks}",
        *LORA,
        "--data=JSON",
        "--data.json_path=rows.json",
        "--data.val_split_fraction=0.2",
        "--data.num_workers=0",
        "--train.global_batch_size=8",
        "--train.micro_batch_size=2",
        "--train.epochs=3",
        "--train.max_steps=6",
        "--train.lr_warmup_steps=2",
        "--train.save_interval=3",
        "--eval.interval=3",
        # With ranks only the first one generates, which no strategy that shards weights can do; so it is skipped.
        f"--eval.max_new_tokens={4 if num_ranks == 1 else 999}",
        "--seed=1",
    ]
    CLI(lora.setup)
    if is_first:
        from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint

        convert_lit_checkpoint(MERGED.parent, CONVERTED.parent)


def _write_checkpoint(folder: Path) -> None:
    """Write random weights, also of LoRA: `ddp` leaves those that it does not load without values."""
    from litgpt.config import Config
    from litgpt.lora import GPT
    from litgpt.lora import Config as LoraConfig
    from litgpt.utils import save_config

    folder.mkdir()
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "name": "Llama-tiny",
        "hf_config": {},
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "n_query_groups": 2,
        "intermediate_size": 48,
        "block_size": 256,
        "vocab_size": NUM_WORDS + 2,
        "padded_vocab_size": NUM_WORDS + 2,
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
    }
    given = dict(item.lstrip("-").split("=") for item in LORA)
    ranks: dict[str, Any] = {"lora_r": int(given["lora_r"]), "lora_alpha": int(given["lora_alpha"])}
    places = ("lora_query", "lora_value", "lora_mlp", "lora_head")
    model = GPT(LoraConfig(**settings, **ranks, **dict.fromkeys(places, True)))
    torch.save(model.state_dict(), folder / "lit_model.pth")
    save_config(Config(**settings), folder)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "</s>": 1} | {f"w{i}": i + 2 for i in range(NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "tokenizer_class": "PreTrained"})
    )


def _write_rows(path: Path) -> None:
    """Write rows of two lengths, so that two shapes are compiled."""

    def words(seed: int, count: int) -> str:
        generator = torch.Generator().manual_seed(seed)
        return " ".join(f"w{i}" for i in torch.randint(NUM_WORDS, (count,), generator=generator))

    rows = [
        {"instruction": words(n, 6), "input": "", "output": words(1000 + n, 8 + 4 * (n % 5 == 0))}
        for n in range(NUM_ROWS)
    ]
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(rows))
    shutil.move(partial, path)


def _wait_for(path: Path) -> None:
    import time

    while not path.exists():
        time.sleep(0.1)

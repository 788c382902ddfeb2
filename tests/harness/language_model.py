"""A tiny tokenizer, data files and run configurations for tests of the fine-tuning command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, set_seed
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from thunder_memsave.finetune.data.packing import Batch
from thunder_memsave.finetune.data.tokenize import IGNORED, Sample
from thunder_memsave.finetune.model.documents_apart import MaskKind
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning

VOCAB_SIZE = 320

TINY_DECODER: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
"""Values of a config with two small layers, for `AutoConfig.for_model` of any decoder."""

_TEXT = "red green blue one two three list tuple dict value name sort join split"
WORDS = tuple(_TEXT.split())

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def write_tokenizer(directory: Path) -> Path:
    """Save a byte-pair tokenizer with `<pad>`, `<end>` and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<end>", "<user>", "<assistant>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return directory


def write_model(directory: Path, **overrides: Any) -> Path:
    """Save a tiny Llama with random weights, and the tokenizer, as one model directory."""
    write_tokenizer(directory)
    set_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**llama_config(), **overrides}))
    model.save_pretrained(directory)
    return directory


def llama_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def rotary_flops_per_token() -> int:
    """Return the FLOPs of rotary angles: a product of matrices with transformers 5.17, none with 5.23."""
    rotary = LlamaRotaryEmbedding(LlamaConfig(**llama_config()))
    with FlopCounterMode(display=False) as counter:
        rotary(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long))
    return int(counter.get_total_flops())


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prompt_rows(num_rows: int) -> list[dict[str, str]]:
    """Return distinct rows of different lengths."""
    return [
        {
            "prompt": f"{WORDS[row % 7]} {row}",
            # The space is here, so that no token reaches over the border.
            "completion": " " + " ".join(WORDS[(row + k) % len(WORDS)] for k in range(1 + row % 5)),
        }
        for row in range(num_rows)
    ]


def sample_of(ids: Sequence[int], targets: Sequence[int] | None = None) -> Sample:
    """Return a sample of these tokens, each of which predicts the next unless targets are given."""
    targets = [*ids[1:], IGNORED] if targets is None else targets
    return Sample(
        input_ids=np.array(ids, dtype=np.int32), targets=np.array(targets, dtype=np.int32)
    )


def run_values(directory: Path, model_directory: Path, **sections: Any) -> dict[str, Any]:
    """Return a complete run in float32 with its data in `directory`; `sections` replace keys."""
    path = write_jsonl(directory / "rows.jsonl", prompt_rows(24))
    values: dict[str, Any] = {
        "model": {"name_or_path": str(model_directory), "dtype": "float32"},
        "lora": {"r": 4, "target_modules": "all-linear"},
        "data": {
            "dataset": {
                "class_path": "PromptJSONL",
                "init_args": {"path": str(path), "val_fraction": 0.25},
            },
            "max_seq_length": 32,
            "packing": False,
        },
        "train": {"global_batch_size": 4, "micro_batch_size": 1, "max_steps": 4},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}},
        "eval": {"every_n_steps": 2, "max_batches": None},
        "checkpoint": {"every_n_steps": 1, "keep_last": 2},
        "output_dir": str(directory / "run"),
    }
    for name, section in sections.items():
        merge = isinstance(section, dict) and isinstance(values.get(name), dict)
        values[name] = {**values[name], **section} if merge else section
    return values


def write_run_file(directory: Path, values: Mapping[str, Any]) -> Path:
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    return path


def document_ids(batch: Batch) -> Tensor:
    """Number the documents at each position of each row: 1, 2, ..., and 0 for padding."""
    positions, ends = torch.arange(batch.input_ids.shape[1]), batch.document_ends
    ended = (positions[None, :, None] >= ends[:, None, :]).sum(-1)
    return torch.where(positions[None] < ends[:, -1:], ended + 1, 0)


def loss_sum(model: nn.Module, batch: Batch, *, mask: MaskKind) -> Tensor:
    """Run the model as the loop does, and add up the cross-entropy of all target tokens."""
    objective = SupervisedFineTuning(mask=mask, length=batch.input_ids.shape[1])
    return objective.loss(model(**objective.model_inputs(batch)), **objective.loss_inputs(batch))

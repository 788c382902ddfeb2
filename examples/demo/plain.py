"""Uses the trained files with transformers and peft alone, without this package."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


class PlainModel:
    """A model directory with an adapter on it."""

    def __init__(self, *, model: Path, adapter: Path) -> None:
        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        base = AutoModelForCausalLM.from_pretrained(model)
        with warnings.catch_warnings():
            # peft asks transformers for an attribute that transformers is renaming.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            self.model = PeftModel.from_pretrained(base, adapter).eval()

    def answer(self, question: str, *, with_adapter: bool) -> str:
        """Write the likeliest answer, token by token."""
        with nullcontext() if with_adapter else self.model.disable_adapter():
            tokens = self.model.generate(
                **self._encode(question),
                max_new_tokens=30,
                do_sample=False,
                no_repeat_ngram_size=3,
            )
        prompt_length = self._encode(question)["input_ids"].shape[1]
        text = self.tokenizer.decode(tokens[0, prompt_length:], skip_special_tokens=True)
        return str(text).strip()

    @torch.no_grad()
    def validation_loss(self, path: Path) -> float:
        """Average over all tokens of the answers, one conversation at a time."""
        total, count = 0.0, 0
        for line in path.read_text(encoding="utf-8").splitlines():
            messages = json.loads(line)["messages"]
            prompt = self._encode(messages[0]["content"])["input_ids"]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            logits = self.model(input_ids=ids).logits[0, prompt.shape[1] - 1 : -1]
            answer = ids[0, prompt.shape[1] :]
            total += float(cross_entropy(logits, answer, reduction="sum"))
            count += len(answer)
        return total / count

    def _encode(self, question: str) -> dict[str, torch.Tensor]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return dict(self.tokenizer(text, return_tensors="pt", add_special_tokens=False))

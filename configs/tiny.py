"""Writes the data of `tiny_pretrain`, `tiny_lora` and `tiny_fp8_cpu`: a tokenizer, texts and questions.

    python -m thunder_memsave.configs.tiny      # writes tiny/ into the working directory

The texts say what comes after what ("After 41 comes 42."), the questions ask for it. Nothing is
downloaded, and a CPU trains both in a few minutes.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_DIRECTORY = Path("tiny")

_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_NUMBERS = [str(number) for number in range(400)]

_PAD, _END = "<|pad|>", "<|end|>"
_ROLES = ("<|user|>", "<|assistant|>", "<|system|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main(directory: Path = _DIRECTORY) -> None:
    """Write everything; the same bytes on every machine."""
    write_tokenizer(directory / "tokenizer")
    facts = list(_facts())
    random.Random(0).shuffle(facts)
    _write_rows(directory / "texts.jsonl", ({"text": answer} for _, answer in facts))
    _write_rows(directory / "questions.jsonl", map(_conversation, facts))
    print(f"wrote {directory}/tokenizer, texts.jsonl and questions.jsonl; go on with:")
    print("  thunder-memsave train tiny_pretrain")
    print("  thunder-memsave train tiny_lora")


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token per byte, and a chat template."""
    special = [_PAD, _END, *_ROLES]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_END,
        extra_special_tokens=list(_ROLES),
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _facts() -> Iterator[tuple[str, str]]:
    """Yield a question and its answer, for each neighbour in each series."""
    for series in (_DAYS, _NUMBERS):
        for first, second in _neighbours(series):
            yield f"What comes after {first}?", f"After {first} comes {second}."
            yield f"What comes before {second}?", f"Before {second} comes {first}."


def _neighbours(series: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from itertools.pairwise(series)
    if series[0].isalpha():  # days start over
        yield series[-1], series[0]


def _conversation(fact: tuple[str, str]) -> dict[str, object]:
    asked, answer = fact
    roles = ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})
    return {"messages": list(roles)}


def _write_rows(path: Path, rows: Iterable[dict[str, object] | dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    if any(argument.startswith("-") for argument in sys.argv[1:]) or len(sys.argv) > 2:
        sys.exit(
            "usage: python -m thunder_memsave.configs.tiny [DIRECTORY], which is 'tiny' if left out"
        )
    main(*map(Path, sys.argv[1:2]))

from __future__ import annotations

from typing import Any

from thunder_memsave.finetune.data.documents import Document, Part
from thunder_memsave.finetune.data.sample_text import describe_sample
from thunder_memsave.finetune.data.tokenize import Sample, tokenize


def samples(tokenizer: Any, *parts: Part, length: int = 64) -> list[Sample]:
    document = Document(parts=parts, origin="here")
    return tokenize(
        [document],
        tokenizer,
        max_seq_length=length,
        assistant_only=any(part.assistant for part in parts),
        continue_long=True,
    ).samples


def test_the_trained_part_of_a_sample_stands_in_brackets(tokenizer: Any) -> None:
    parts = (Part(text="red"), Part(text=" green", assistant=True))
    (sample,) = samples(tokenizer, *parts)
    assert describe_sample(sample, tokenizer) == "red⟦ green<end>⟧"


def test_the_target_of_a_pieces_last_position_is_shown_too(tokenizer: Any) -> None:
    first, *_ = samples(tokenizer, Part(text="red green blue"), length=2)
    last = int(first.targets[-1])
    text = describe_sample(first, tokenizer)
    assert text.endswith(f"{tokenizer.decode([last])}⟧")
    assert tokenizer.decode([*first.input_ids, last]) == text.replace("⟦", "").replace("⟧", "")


def test_a_long_sample_is_cut_and_says_so(tokenizer: Any) -> None:
    (sample,) = samples(tokenizer, Part(text="red" * 20))
    assert describe_sample(sample, tokenizer, max_tokens=2) == "red⟦red⟧ ... and 19 more tokens"

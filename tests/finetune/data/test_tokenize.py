from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from thunder_memsave.finetune.data.counting import Counting
from thunder_memsave.finetune.data.documents import Document, Part
from thunder_memsave.finetune.data.tokenize import IGNORED, TokenizedData, tokenize
from thunder_memsave.settings.problems import ConfigError


def document(*parts: str, rendered: bool = False) -> Document:
    """Return a document whose second part, if any, the model is to write."""
    made = [Part(text=text, assistant=index == 1) for index, text in enumerate(parts)]
    return Document(parts=tuple(made), origin="here", rendered=rendered)


def tokenized(
    tokenizer: Any, *documents: Document, length: int = 64, **options: bool
) -> TokenizedData:
    settings: dict[str, Any] = {"assistant_only": False, "continue_long": False, **options}
    return tokenize(list(documents), tokenizer, max_seq_length=length, **settings)


def test_each_position_has_the_next_token_as_its_target(tokenizer: Any) -> None:
    (sample,) = tokenized(tokenizer, document("red green blue")).samples
    assert tokenizer.decode(sample.input_ids) == "red green blue<end>"
    assert sample.targets.tolist() == [*sample.input_ids[1:], IGNORED]


def test_only_the_completion_and_its_end_are_targets(tokenizer: Any) -> None:
    (sample,) = tokenized(tokenizer, document("red", " green"), assistant_only=True).samples
    targets = [target for target in sample.targets if target != IGNORED]
    assert tokenizer.decode(targets) == " green<end>"


@pytest.mark.parametrize(("assistant_only", "expected"), [(True, " green<end>"), (False, None)])
def test_an_end_token_that_the_tokenizer_puts_on_is_trained_and_not_doubled(
    tokenizer_directory: Path, assistant_only: bool, expected: str | None
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<user> $A <end>", special_tokens=[("<user>", 2), ("<end>", 1)]
    )
    texts = document("red", " green")
    (sample,) = tokenized(tokenizer, texts, assistant_only=assistant_only).samples
    assert tokenizer.decode(sample.input_ids) == "<user>red green<end>"
    targets = [target for target in sample.targets if target != IGNORED]
    assert tokenizer.decode(targets) == (expected or "red green<end>")


def test_parts_are_tokenized_together_and_a_token_across_the_border_is_trained(
    tokenizer: Any,
) -> None:
    whole = tokenizer("red green", add_special_tokens=False)["input_ids"]
    (sample,) = tokenized(tokenizer, document("red gr", "een"), assistant_only=True).samples
    assert sample.input_ids.tolist() == [*whole, tokenizer.eos_token_id]
    trained = tokenizer.decode([target for target in sample.targets if target != IGNORED])
    assert trained.endswith("een<end>")


def test_a_rendered_chat_gets_no_tokens_added(tokenizer: Any) -> None:
    (sample,) = tokenized(tokenizer, document("<user>red<end>", rendered=True)).samples
    assert tokenizer.decode(sample.input_ids) == "<user>red<end>"


def test_a_long_document_is_cut_and_counted(tokenizer: Any) -> None:
    data = tokenized(tokenizer, document("red " * 40), document("red"), length=8)
    assert [len(sample.input_ids) for sample in data.samples] == [8, 2]
    assert data.counts.num_truncated == 1
    # The token after the last position is known, so that position has a loss too.
    assert data.samples[0].num_targets == 8


@pytest.mark.parametrize("num_words", [1, 6, 7, 8, 9, 15, 16, 17, 40])
def test_a_long_text_goes_on_and_every_token_but_the_first_is_a_target_once(
    tokenizer: Any, num_words: int
) -> None:
    text = document(" red" * num_words)
    (whole,) = tokenized(tokenizer, text, length=512).samples
    pieces = tokenized(tokenizer, text, length=8, continue_long=True)
    assert [t for piece in pieces.samples for t in piece.targets if t != IGNORED] == (
        whole.input_ids[1:].tolist()
    )
    assert all(len(piece.input_ids) <= 8 for piece in pieces.samples)
    assert pieces.counts.num_truncated == 0


def test_documents_without_a_target_are_left_out_and_counted(tokenizer: Any) -> None:
    long_prompt = document("red " * 40, "green")
    data = tokenized(
        tokenizer, long_prompt, document("red ", "green"), length=16, assistant_only=True
    )
    assert len(data.samples) == 1
    assert data.counts.num_without_targets == 1


def test_data_without_any_target_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="none of the 1 data documents has a token to train on"):
        tokenized(tokenizer, document("red " * 40, "green"), length=16, assistant_only=True)


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a fast tokenizer"):
        tokenized(SimpleNamespace(is_fast=False), document("red"))


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer_directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="the tokenizer has no eos_token, which ends each"):
        tokenized(tokenizer, document("red"))
    (sample,) = tokenized(tokenizer, document("<user>red", rendered=True)).samples
    assert tokenizer.decode(sample.input_ids) == "<user>red"


def test_documents_keep_their_order_over_calls_of_the_tokenizer(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thunder_memsave.finetune.data.tokenize._DOCUMENTS_PER_CALL", 3)
    texts = [f"red {number}" for number in range(8)]
    documents = [document(text, rendered=number % 4 == 1) for number, text in enumerate(texts)]
    decoded = [tokenizer.decode(s.input_ids) for s in tokenized(tokenizer, *documents).samples]
    ends = ["" if number % 4 == 1 else "<end>" for number in range(8)]
    assert decoded == [text + end for text, end in zip(texts, ends, strict=True)]


def test_a_long_count_is_reported_by_the_first_process_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 4.0, 5.0, 10.0, 20.0])
    monkeypatch.setattr(
        "thunder_memsave.finetune.data.counting.time.monotonic", lambda: next(clock)
    )
    counting = Counting("tokenizing", total=2000)
    for _ in range(4):
        counting.add(400)
    assert capsys.readouterr().err.splitlines() == [
        "tokenizing: 800 of 2,000 (200/s)",
        "tokenizing: 1,600 of 2,000 (160/s)",
    ]
    monkeypatch.setenv("LOCAL_RANK", "1")
    counting.add(400)
    assert not capsys.readouterr().err

"""Writes the demo's data: texts to pre-train on, and questions with answers to fine-tune on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from docstrings import Docstring

# An answer is a sentence: it starts like one, and is neither a signature nor an example.
_SENTENCE = re.compile(r"[A-Z][a-z]*\s[^>=]{10,110}")

_QUESTIONS = {
    "function": ("What does {name} do?", "Explain the function {name} in one sentence."),
    "class": ("What is the class {name} for?", "Describe the class {name} in one sentence."),
    "module": ("What is the module {name} for?", "Describe the module {name} in one sentence."),
}


def write_texts(docstrings: Sequence[Docstring], directory: Path) -> None:
    """Write `texts.jsonl` and `texts_val.jsonl` with rows `{"text": ...}`."""
    texts = [(doc.held_out, {"text": f"{doc.name}\n\n{doc.text}"}) for doc in docstrings]
    _write(directory / "texts.jsonl", (row for held_out, row in texts if not held_out))
    _write(directory / "texts_val.jsonl", (row for held_out, row in texts if held_out))


def write_questions(docstrings: Sequence[Docstring], directory: Path) -> None:
    """Write `questions.jsonl` and `questions_val.jsonl` with rows `{"messages": [...]}`.

    The questions of the second file are neither in the first one nor in the texts that the model was
    pre-trained on.
    """
    answerable = [doc for doc in docstrings if is_answerable(doc)]
    rows = [(doc.held_out, _conversation(doc, number)) for number, doc in enumerate(answerable)]
    _write(directory / "questions.jsonl", (row for held_out, row in rows if not held_out))
    _write(directory / "questions_val.jsonl", (row for held_out, row in rows if held_out))


def is_answerable(doc: Docstring) -> bool:
    """Tell whether the summary is a sentence about something of the library's first level."""
    return doc.name.count(".") <= 1 and bool(_SENTENCE.fullmatch(doc.summary))


def question(doc: Docstring) -> str:
    """Ask the first of the questions about something."""
    return _QUESTIONS[doc.kind][0].format(name=doc.name)


def _conversation(doc: Docstring, number: int) -> Mapping[str, object]:
    templates = _QUESTIONS[doc.kind]
    asked = templates[number % len(templates)].format(name=doc.name)
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": doc.summary},
        ]
    }


def _write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

"""Templates that behave like those of ChatML, Llama 3.1 and Qwen3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from harness.language_model import write_jsonl
from thunder_memsave.finetune.data.chat import render_chat
from thunder_memsave.finetune.data.formats import ChatJSONL
from thunder_memsave.finetune.data.tokenize import IGNORED, tokenize
from thunder_memsave.settings.problems import ConfigError

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# A header in every conversation, texts without outer spaces, no newline after a turn.
TRIMMED = (
    "<begin>{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "[system]Today.{{ system }}<end>{% for m in messages %}"
    "[{{ m.role }}]{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Thinking is rendered for answers after the last question only, and then even if there is none;
# a conversation without a question is refused.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if ns.last < 0 %}{{ raise_exception('there is no question') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{% set text = m.content %}"
    "{% if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1] %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought | trim }}\n</think>\n\n{% endif %}"
    "{% endif %}{{ text }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% if enable_thinking is defined %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<end>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<end>\n{% endif %}{% endfor %}"
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<end>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SYSTEM = {"role": "system", "content": "green"}
TWO_TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": " two "},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "list"},
]


@pytest.fixture
def chat_tokenizer(tokenizer_directory: Path) -> Any:
    """A tokenizer with a template that a test may set."""
    return AutoTokenizer.from_pretrained(tokenizer_directory)


def answers(tokenizer: Any, template: str, messages: Any, **row: Any) -> list[str]:
    """Return the trained text, and check that the parts are the rendered conversation."""
    tokenizer.chat_template = template
    parts = render_chat({"messages": messages, **row}, tokenizer)
    whole = tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False)
    assert "".join(part.text for part in parts) == whole
    return [part.text for part in parts if part.assistant]


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (CHATML, [" two <end>\n", "list<end>\n"]),
        (TRIMMED, ["two<end>", "list<end>"]),
        (THINKING, [" two <end>\n", "<think>\n\n</think>\n\nlist<end>\n"]),
        (MARKED, [" two <end>", "list<end>"]),
    ],
    ids=["chatml", "trimmed", "thinking", "marked"],
)
@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["without system", "with system"])
def test_every_answer_is_trained_on_as_the_template_renders_it(
    chat_tokenizer: Any, template: str, trained: list[str], system: Any
) -> None:
    assert answers(chat_tokenizer, template, [*system, *TWO_TURNS]) == trained


def test_thinking_is_trained_on_where_the_template_renders_it(chat_tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nred\n</think>\n\ntwo"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "three", "reasoning_content": "blue"},
    ]
    assert answers(chat_tokenizer, THINKING, messages) == [
        "two<end>\n",
        "<think>\nblue\n</think>\n\nthree<end>\n",
    ]


def test_answers_with_equal_texts_are_each_found_in_their_place(chat_tokenizer: Any) -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    chat_tokenizer.chat_template = THINKING
    parts = render_chat({"messages": turn * 3}, chat_tokenizer)
    trained = [part.assistant for part in parts]
    assert trained == [False, True] * 3
    assert [part.text for part in parts][:3] == [
        "<|user|>\na<end>\n<|assistant|>\n",
        "a<end>\n",
        "<|user|>\na<end>\n<|assistant|>\n",
    ]


def test_a_conversation_that_begins_with_an_answer_has_its_text_trained(
    chat_tokenizer: Any,
) -> None:
    messages = [{"role": "assistant", "content": "two"}, *TWO_TURNS]
    assert answers(chat_tokenizer, TRIMMED, messages)[0] == "two<end>"


def test_marks_train_the_tokens_that_transformers_itself_would(
    tmp_path: Path, chat_tokenizer: Any
) -> None:
    chat_tokenizer.chat_template = MARKED
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": TWO_TURNS}])
    documents = ChatJSONL(path=str(path)).load(chat_tokenizer).train
    (sample,) = tokenize(
        documents, chat_tokenizer, max_seq_length=512, assistant_only=True, continue_long=False
    ).samples
    theirs = chat_tokenizer.apply_chat_template(TWO_TURNS, return_assistant_tokens_mask=True)
    assert sample.input_ids.tolist() == theirs["input_ids"]
    assert (sample.targets != IGNORED).tolist() == [
        *map(bool, theirs["assistant_masks"][1:]),
        False,
    ]


def test_tools_and_their_calls_reach_the_template(chat_tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "sort", "arguments": {}}}
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "three", "tool_calls": None},
    ]
    trained = answers(chat_tokenizer, TOOLS, messages, tools=[{"name": "sort"}])
    row = {"messages": messages, "tools": [{"name": "sort"}]}
    as_text = {**row, "tools": json.dumps(row["tools"])}
    assert render_chat(as_text, chat_tokenizer) == render_chat(row, chat_tokenizer)
    assert [text.count("sort") for text in trained] == [1, 0]
    assert trained[1] == "three<end>"


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (CHATML, {"tools": [{}]}, "has 'tools', which the chat template does not use"),
        (TOOLS, {"tools": "sort"}, "'tools' is a text, but not of JSON: Expecting value"),
        (TOOLS, {"tools": '{"name": "sort"}'}, "'tools' must be a list of JSON objects"),
        (
            CHATML,
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            "a message has 'weight', which the chat template does not use; remove it",
        ),
        (
            THINKING,
            {"messages": [{"role": "assistant", "content": "a"}]},
            "the chat template refuses this conversation: there is no question",
        ),
        (
            "{{ messages | length }}{{ messages[-1]['content'] }}",
            {},
            "the text of message 2 cannot be told apart in what the chat template makes",
        ),
        (CHATML, {"messages": [{"role": "assistant", "content": ""}]}, "'content' is ''"),
        (CHATML, {"messages": [{"role": "user"}]}, "there is no 'content'"),
    ],
)
def test_a_conversation_that_the_template_cannot_serve_is_refused(
    chat_tokenizer: Any, template: str, row: Any, message: str
) -> None:
    chat_tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message):
        render_chat({"messages": TWO_TURNS, **row}, chat_tokenizer)


DATED = (
    "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<system>{{ date_string }}<end>"
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def test_a_variable_of_the_template_is_given_by_the_run_file(
    chat_tokenizer: Any, tmp_path: Path
) -> None:
    """Otherwise Llama 3.2's template, for one, writes today's date."""
    chat_tokenizer.chat_template = DATED
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": TWO_TURNS}])
    dataset = ChatJSONL(path=str(path), chat_template_kwargs={"date_string": "26 Jul 2024"})
    (document,) = dataset.load(chat_tokenizer).train
    text = "".join(part.text for part in document.parts)
    assert text.startswith("<system>26 Jul 2024<end><user>")
    assert any(part.assistant for part in document.parts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "datestring",
            r"kwargs sets 'datestring', which the tokenizer's chat template does not use",
        ),
        ("messages", r"sets 'messages', which comes from the data; remove it"),
    ],
)
def test_a_variable_that_the_template_does_not_use_is_refused(
    name: str, message: str, chat_tokenizer: Any, tmp_path: Path
) -> None:
    chat_tokenizer.chat_template = DATED
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": TWO_TURNS}])
    with pytest.raises(ConfigError, match=message) as error:
        ChatJSONL(path=str(path), chat_template_kwargs={name: 1}).load(chat_tokenizer)
    assert error.value.key == f"data.dataset.init_args.chat_template_kwargs.{name}"

"""Renders conversations with the tokenizer's chat template, and finds the assistant's text in them.

A template with `{% generation %}` marks says itself what the assistant writes. In any other, an
assistant's message is the text after the generation prompt, to the end of what the template writes
for the message, including its end-of-turn token. Some templates render earlier messages differently
from the last one (they drop its thinking, say): the trained text is always a piece of the whole
conversation as the template renders it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from thunder_memsave.finetune.data.documents import Part
from thunder_memsave.finetune.data.files.jsonl import string_of
from thunder_memsave.settings.problems import ConfigError

Message: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Marks where a message's text begins or ends; a private-use character, so in no text.
_MARK = "\ue0f7"
# transformers passes the model's thinking to a template under all of these names.
_THINKING = ("reasoning", "reasoning_content", "thinking")
# Arguments of a template that do not come from the user's variables.
_OURS = ("messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt")


def render_chat(
    row: Mapping[str, Any], tokenizer: Any, variables: Mapping[str, Any] | None = None
) -> tuple[Part, ...]:
    """Render a row's `messages`, with its `tools` if it has any.

    Args:
        row: One row of the data.
        tokenizer: The tokenizer with the template.
        variables: Values of further names in the template, such as `enable_thinking`.

    Raises:
        ConfigError: the messages are malformed, the template refuses them or does not use all of
            them, or an assistant's text cannot be told apart.
    """
    chat = _Chat(
        tokenizer=tokenizer,
        messages=_messages_of(row),
        tools=_tools_of(row),
        variables=variables or {},
    )
    chat.check_fields()
    if _GENERATION_MARK.search(chat.template):
        text, spans = chat.render_marked()
    else:
        text = chat.render(chat.messages)
        spans = list(_assistant_spans(chat, text))
    return tuple(_parts(text, spans))


def check_variables(variables: Mapping[str, Any], tokenizer: Any, *, key: str) -> None:
    """Refuse variables that the template does not use, or that come from the data.

    Raises:
        ConfigError: there is such a variable; `key` is the setting that holds them.
    """
    template = str(tokenizer.get_chat_template())
    for name in variables:
        if name in _OURS:
            raise ConfigError(
                f"{key} sets {name!r}, which comes from the data; remove it.", key=f"{key}.{name}"
            )
        if name not in template:
            raise ConfigError(
                f"{key} sets {name!r}, which the tokenizer's chat template does not use; remove it, or look at the "
                "template for the name that it uses.",
                key=f"{key}.{name}",
            )


def check_chat(row: Mapping[str, Any]) -> tuple[Part, ...]:
    """Check a row as far as possible without a template; returns no parts.

    Raises:
        ConfigError: the messages are malformed.
    """
    _messages_of(row)
    _tools_of(row)
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chat:
    """A conversation and the template that renders it."""

    tokenizer: Any
    messages: Sequence[Message]
    tools: list[Any] | None
    variables: Mapping[str, Any]

    @property
    def template(self) -> str:
        return str(self.tokenizer.get_chat_template(tools=self.tools))

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render some of the messages, optionally with the generation prompt."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=self.tools,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **self.variables,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"the chat template refuses this conversation: {error}") from error

    def render_marked(self) -> tuple[str, list[Span]]:
        """Render everything, and return the spans that the template marks."""
        try:
            rendered: Any = render_jinja_template(
                [list(self.messages)],
                tools=self.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
                **self.variables,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"the chat template refuses this conversation: {error}") from error
        (text,), (spans,) = rendered
        return str(text), [(start, end) for start, end in spans]

    def check_fields(self) -> None:
        """Refuse fields that the template never uses, as far as its text shows."""
        template = self.template
        if self.tools is not None and "tools" not in template:
            raise ConfigError("the row has 'tools', which the chat template does not use.")
        for message in self.messages:
            for key in message.keys() - {"role", "content"}:
                names = _THINKING if key in _THINKING else (key,)
                if not any(name in template for name in names):
                    raise ConfigError(
                        f"a message has {key!r}, which the chat template does not use; remove it."
                    )


def _messages_of(row: Mapping[str, Any]) -> list[Message]:
    """Return the checked conversation, which must have an assistant's message."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError("there is no 'messages' list, or it is empty.")
    checked = [_checked(message) for message in messages]
    if not any(message["role"] == "assistant" for message in checked):
        raise ConfigError("there is no message with the role 'assistant' to learn from.")
    return checked


def _checked(message: Any) -> Message:
    if not isinstance(message, dict):
        raise ConfigError(f"the message {message!r} must have 'role' and 'content'.")
    # Tables write null into every row for a column that some rows have.
    given = {key: value for key, value in message.items() if value is not None}
    string_of(given, "role")
    if given.get("content") or _needs_content(given):
        string_of(given, "content")
    return given


def _needs_content(message: Message) -> bool:
    """Tell whether a message must have text: an assistant's may have tool calls instead, others may be empty."""
    if message["role"] == "assistant":
        return not message.get("tool_calls")
    return "content" not in message


def _tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if tools is None or tools in ([], ""):
        return None
    if isinstance(tools, str):  # as in tables, whose columns have one type
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"'tools' is a text, but not of JSON: {error}.") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError("'tools' must be a list of JSON objects, each describing one tool.")
    return tools


def _assistant_spans(chat: _Chat, text: str) -> Iterator[Span]:
    done = 0
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            start, end = _start(chat, text, index), _end(chat, text, index)
            if not done <= start < end:
                raise ConfigError(_cannot_tell_apart(index))
            yield start, end
            done = end


def _start(chat: _Chat, text: str, index: int) -> int:
    """Find the end of the generation prompt, or else the beginning of the message's own text."""
    if index > 0:
        prompt = chat.render(chat.messages[:index], prompt=True)
        if text.startswith(prompt):
            return len(prompt)
    return _marked(chat, text, index, before=True)


def _end(chat: _Chat, text: str, index: int) -> int:
    """Find the end of the turn, also if the message is rendered differently when it is the last."""
    if index == len(chat.messages) - 1:
        return len(text)
    until_here = chat.render(chat.messages[: index + 1])
    if text.startswith(until_here):
        return len(until_here)
    end = _marked(chat, text, index, before=False)
    as_last = dataclasses.replace(chat, messages=chat.messages[: index + 1])
    end_of_turn = until_here[_marked(as_last, until_here, index, before=False) :]
    if not text.startswith(end_of_turn, end):
        raise ConfigError(_cannot_tell_apart(index))
    return end + len(end_of_turn)


def _marked(chat: _Chat, text: str, index: int, *, before: bool) -> int:
    """Find the beginning or end of a message's text by rendering the conversation with a mark there."""
    content = chat.messages[index].get("content", "")
    changed = {
        **chat.messages[index],
        "content": _MARK + content if before else content + _MARK,
    }
    messages = [*chat.messages[:index], changed, *chat.messages[index + 1 :]]
    place, found, rest = chat.render(messages).partition(_MARK)
    if not found or place + rest != text:
        raise ConfigError(_cannot_tell_apart(index))
    return len(place)


def _cannot_tell_apart(index: int) -> str:
    return (
        f"the text of message {index + 1} cannot be told apart in what the chat template makes of "
        "the conversation; put {% generation %} and {% endgeneration %} around the assistant's "
        "text in the template, or give single-turn conversations."
    )


def _parts(text: str, spans: Sequence[Span]) -> Iterator[Part]:
    """Cut the text at the spans; text inside a span is the assistant's."""
    done = 0
    for start, end in spans:
        if start > done:
            yield Part(text=text[done:start])
        yield Part(text=text[start:end], assistant=True)
        done = end
    if done < len(text):
        yield Part(text=text[done:])

"""Makes the two documents of a pair: the same prompt with the chosen and with the rejected completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

from thunder_memsave.finetune.data.chat import check_chat, render_chat
from thunder_memsave.finetune.data.documents import Document, Part
from thunder_memsave.finetune.data.files.jsonl import check_encodable, string_of
from thunder_memsave.settings.problems import ConfigError

_Messages: TypeAlias = Sequence[Any]
_ASKS = ("system", "user")
"""Roles with which a whole conversation begins, and no completion."""


def pair_of(
    row: Mapping[str, Any], tokenizer: Any, *, variables: Mapping[str, Any], origin: str
) -> Document:
    """Check a row and make the chosen document, which holds the rejected one.

    `chosen` and `rejected` are texts, or lists of messages. They follow `prompt`, a text or a list of messages; without
    one, or if they are conversations that begin with a user's message, what both begin with is the prompt.

    Args:
        row: The row.
        tokenizer: Of the model; None checks the row as far as possible without one.
        variables: Values of further names in the chat template.
        origin: The file and the row in it, for messages.

    Raises:
        ConfigError: the row cannot be used.
    """
    sides = [row["chosen"], row["rejected"]]
    if all(isinstance(side, list) for side in sides):
        both = _chats(row, tokenizer, variables)
        is_rendered = True
    elif any(isinstance(side, list) for side in sides):
        raise ConfigError("'chosen' and 'rejected' must both be texts, or both lists of messages.")
    else:
        both = _texts(row)
        is_rendered = False
    for parts in both:
        check_encodable(parts)
    chosen, rejected = (
        Document(parts=parts, origin=origin, rendered=is_rendered) for parts in both
    )
    return dataclasses.replace(chosen, rejected=rejected)


def _texts(row: Mapping[str, Any]) -> list[tuple[Part, ...]]:
    sides = [string_of(row, key) for key in ("chosen", "rejected")]
    prompt = row.get("prompt")
    if prompt is None:
        prompt = _shared_text(*sides)
        sides = [side[len(prompt) :] for side in sides]
    else:
        prompt = string_of(row, "prompt")
    _refuse_alike(sides)
    for key, side in zip(("chosen", "rejected"), sides, strict=True):
        if not side:
            raise ConfigError(f"{key!r} has nothing after what both texts begin with.")
    first = (Part(text=prompt),) if prompt else ()
    return [(*first, Part(text=side, assistant=True)) for side in sides]


def _shared_text(chosen: str, rejected: str) -> str:
    """Return what both begin with, but for a space at its end: tokens begin with spaces."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    return "".join(a for a, _ in alike).removesuffix(" ")


def _chats(
    row: Mapping[str, Any], tokenizer: Any, variables: Mapping[str, Any]
) -> list[tuple[Part, ...]]:
    prompt, *sides = _split(row)
    _refuse_alike(sides)
    rows = [{"messages": [*prompt, *side], "tools": row.get("tools")} for side in sides]
    for key, side in zip(("chosen", "rejected"), sides, strict=True):
        if not any(_role(message) == "assistant" for message in side):
            raise ConfigError(
                f"{key!r} has no message with the role 'assistant' after what both conversations begin with."
            )
    if tokenizer is None:
        return [check_chat(each) for each in rows]
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "'chosen' and 'rejected' are messages, for which the tokenizer has no chat template; give texts, or add "
            "chat_template.jinja to the model's directory."
        )
    num_earlier = sum(_role(message) == "assistant" for message in prompt)
    return [_of_last(render_chat(each, tokenizer, variables), num_earlier) for each in rows]


def _split(row: Mapping[str, Any]) -> tuple[_Messages, _Messages, _Messages]:
    """Return the messages of the prompt, and those that follow it in both conversations."""
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    is_whole = all(bool(side) and _role(side[0]) in _ASKS for side in (chosen, rejected))
    if prompt is None or is_whole:
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        return chosen[:shared], chosen[shared:], rejected[shared:]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": string_of(row, "prompt")}]
    if not isinstance(prompt, list):
        raise ConfigError("'prompt' must be a text or a list of messages.")
    return prompt, chosen, rejected


def _refuse_alike(sides: Sequence[Any]) -> None:
    if sides[0] == sides[1]:
        raise ConfigError("'chosen' and 'rejected' are the same, so there is no preference.")


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _of_last(parts: tuple[Part, ...], num_earlier: int) -> tuple[Part, ...]:
    """Unmark what the assistant said in the prompt: its first pieces."""
    left = num_earlier
    found = []
    for part in parts:
        if part.assistant and left:
            left -= 1
            found.append(dataclasses.replace(part, assistant=False))
        else:
            found.append(part)
    return tuple(found)

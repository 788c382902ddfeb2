"""Recognises what a row is by its keys, and turns the formats that people have into messages, prompts or text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from thunder_memsave.settings.problems import ConfigError

Row: TypeAlias = Mapping[str, Any]
FormatName = Literal["messages", "sharegpt", "alpaca", "prompt", "pair", "text", "tokens"]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

# Stanford Alpaca's own prompts (github.com/tatsu-lab/stanford_alpaca, prompt_dict in train.py).
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """A format of rows."""

    name: FormatName
    shown: str
    """Name and keys, for messages."""
    keys: tuple[str, ...]
    """The keys that every row has."""
    is_one: Callable[[Row], bool]
    """Whether a row has this format, by its keys and the types of their values."""
    reader: str
    """The dataset class for JSONL rows of this format."""

    @property
    def has_assistant_part(self) -> bool:
        """Whether rows tell apart what the model is to write."""
        return self.name != "text"


def _is_sharegpt(row: Row) -> bool:
    return _is_list_with(row.get("conversations"), "from")


def _is_list_with(value: Any, key: str) -> bool:
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and key in value[0]
    )


def _has(*keys: str) -> Callable[[Row], bool]:
    return lambda row: all(key in row for key in keys)


FORMATS: Mapping[FormatName, RowFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            RowFormat(
                name="pair",
                shown="pairs of preferences ('chosen' and 'rejected')",
                keys=("chosen", "rejected"),
                is_one=_has("chosen", "rejected"),
                reader="DataFiles",
            ),
            RowFormat(
                name="messages",
                shown="chats ('messages' with 'role' and 'content')",
                keys=("messages",),
                is_one=_has("messages"),
                reader="ChatJSONL",
            ),
            RowFormat(
                name="sharegpt",
                shown="ShareGPT ('conversations' with 'from' and 'value')",
                keys=("conversations",),
                is_one=_is_sharegpt,
                reader="DataFiles",
            ),
            RowFormat(
                name="prompt",
                shown="prompts ('prompt' and 'completion')",
                keys=("prompt", "completion"),
                is_one=_has("prompt", "completion"),
                reader="PromptJSONL",
            ),
            RowFormat(
                name="alpaca",
                shown="Alpaca ('instruction', 'input' and 'output')",
                keys=("instruction", "output"),
                is_one=_has("instruction", "output"),
                reader="DataFiles",
            ),
            RowFormat(
                name="tokens",
                shown="tokens ('input_ids', and 'labels' if not all are trained on)",
                keys=("input_ids",),
                is_one=_has("input_ids"),
                reader="DataFiles",
            ),
            RowFormat(
                name="text",
                shown="texts ('text')",
                keys=("text",),
                is_one=_has("text"),
                reader="TextJSONL",
            ),
        )
    }
)
"""The formats, in the order in which a row is compared with them: a row that also has 'text' is not one of texts."""


def recognised(row: Row) -> RowFormat | None:
    """Return the format that a row has; None: none of ours."""
    return next((each for each in FORMATS.values() if each.is_one(row)), None)


def as_messages(row: Row) -> dict[str, Any]:
    """Turn a ShareGPT row into one with `messages`; its `system` becomes the first message, `tools` stay.

    Raises:
        ConfigError: a turn is not `{"from": ..., "value": ...}`, or its `from` is not known.
    """
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise ConfigError("there is no 'conversations' list, or it is empty.")
    messages = [_message(turn) for turn in turns]
    if isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, {"role": "system", "content": row["system"]})
    return {"messages": messages, "tools": row.get("tools")}


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise ConfigError(f"the turn {turn!r} must have 'from' and 'value'.")
    role = _ROLES.get(str(turn["from"]).lower())
    if role is None:
        raise ConfigError(
            f"the turn is from {turn['from']!r}, which is not known; write one of {', '.join(_ROLES)}."
        )
    return {"role": role, "content": turn["value"]}


def alpaca_messages(row: Row) -> dict[str, Any]:
    """Turn an Alpaca row into a chat: instruction and input, a blank line between them, are the user's message."""
    asked = "\n\n".join(text for text in (row["instruction"], row.get("input")) if text)
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return {"messages": messages}


def alpaca_prompt(row: Row) -> dict[str, str]:
    """Turn an Alpaca row into a prompt and a completion, in the words of Stanford Alpaca."""
    template = _ALPACA_WITH_INPUT if row.get("input") else _ALPACA
    prompt = template.format(instruction=row["instruction"], input=row.get("input"))
    return {"prompt": prompt, "completion": row["output"]}

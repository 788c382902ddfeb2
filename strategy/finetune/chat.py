"""Renders conversations by the tokenizer's chat template, telling apart what the model writes."""

from __future__ import annotations

from typing import Any

from thunder_memsave.finetune.documents import Part
from thunder_memsave.settings import ConfigError


def render_chat(messages: list[dict[str, str]], tokenizer: Any) -> tuple[Part, ...]:
    """Render the growing conversation, so that each assistant message is what it adds.

    Raises:
        ConfigError: the template does not only append.
    """
    parts: list[Part] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = _render(messages[:index], tokenizer, add_generation_prompt=True)
            parts.append(Part(text=_added(prompt, done)))
            done = prompt
        whole = _render(messages[: index + 1], tokenizer)
        parts.append(Part(text=_added(whole, done), assistant=message["role"] == "assistant"))
        done = whole
    return tuple(parts)


def _render(messages: list[dict[str, str]], tokenizer: Any, **options: bool) -> str:
    if not messages:
        return ""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _added(text: str, done: str) -> str:
    if not text.startswith(done):
        raise ConfigError(
            "the chat template rewrites earlier messages when later ones follow, so the "
            "assistant's tokens cannot be told apart; give single-turn conversations."
        )
    return text[len(done) :]

"""Reads what a user types, and prints the answers, until Ctrl-D."""

from __future__ import annotations

import contextlib
import sys

from thunder_memsave.finetune.chat.answering import Answering, Message
from thunder_memsave.finetune.chat.options import ChatOptions
from thunder_memsave.settings.problems import ConfigError

_KEYS = "Ctrl-C stops an answer, Ctrl-D ends; /new begins another conversation"


def converse(answering: Answering, options: ChatOptions) -> None:
    """Answer the prompt of the options, or every line that is typed or piped in."""
    begin = [] if options.system is None else [Message(role="system", content=options.system)]
    if options.prompt is not None:
        answering.answer([*begin, Message(role="user", content=options.prompt)])
        return
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # edits lines
            import readline  # noqa: F401
    print(f"{answering.shown}\n{_how(answering)}\n{_KEYS}\n", flush=True)
    messages = [*begin]
    while (line := _next_line(is_terminal=is_terminal)) is not None:
        if line == "/new":
            messages = [*begin]
        elif line:
            messages = _answered(answering, [*messages, Message(role="user", content=line)])


def _how(answering: Answering) -> str:
    if answering.is_chat:
        return "messages are rendered by the chat template"
    if answering.tokenizer.chat_template is None:
        return "the tokenizer has no chat template: what you type is continued as a text"
    return "what you type is continued as a text, as in training"


def _next_line(*, is_terminal: bool) -> str | None:
    """Return what is typed, without spaces around it; None at the end."""
    try:
        return input("> " if is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        if is_terminal:
            print()
        return None


def _answered(answering: Answering, messages: list[Message]) -> list[Message]:
    """Answer, and return the conversation; without the last message if there is no whole answer."""
    try:
        text = answering.answer(messages)
    except KeyboardInterrupt:
        print("\n(stopped; this message is not remembered)", flush=True)
        return messages[:-1]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return messages[:-1]
    return [*messages, Message(role="assistant", content=text)]

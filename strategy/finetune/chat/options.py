"""Reads the arguments of `thunder-memsave chat`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thunder_memsave.finetune.run_file.reading.arguments import take_options
from thunder_memsave.settings.fsspec_address import is_address, require_address
from thunder_memsave.settings.problems import ConfigError, suggestion

BASE = "--model.name_or_path"
_OPTIONS = {
    "--prompt": "'Who are you?'",
    "--system": "'You answer in one sentence.'",
    "--temperature": "0.7",
    "--max-new-tokens": "256",
    BASE: "models/llama",
}
_FLAGS = ("--plain",)
_USAGE = "thunder-memsave chat RUN [--prompt TEXT] [--temperature 0.7]"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """Arguments of the command line."""

    run: Path
    """An output_dir, one of its checkpoints, or an exported adapter or model."""
    address: str | None = None
    """Where the run is, if that is no path."""
    prompt: str | None = None
    """The only message; None reads messages from the terminal."""
    system: str | None = None
    temperature: float | None = None
    """0 takes the most probable token; None is what the model's generation_config.json says."""
    max_new_tokens: int = 512
    plain: bool = False
    """Whether text is continued without the chat template."""
    base: str | None = None
    """Where the base model is now; None: where it was."""


def parse_chat_options(arguments: Sequence[str]) -> ChatOptions:
    """Read the command's arguments.

    Raises:
        ConfigError: one is missing, unknown or has an invalid value.
    """
    given, rest = take_options(arguments, _OPTIONS, flags=_FLAGS)
    for each in rest:
        if each.name.startswith("--"):
            nearest = suggestion(each.name, (*_OPTIONS, *_FLAGS))
            raise ConfigError(f"chat has no option {each.name!r}{nearest} Write {_USAGE}.")
    if len(rest) != 1:
        raise ConfigError(f"chat needs one run: {_USAGE}.")
    if "--plain" in given and "--system" in given:
        raise ConfigError("--system is a message of a chat; leave it or --plain out.")
    run = rest[0].shown
    if is_address(run):
        require_address(run, key="RUN")
    return ChatOptions(
        run=Path(run),
        address=run if is_address(run) else None,
        prompt=given.get("--prompt"),
        system=given.get("--system"),
        temperature=_temperature(given.get("--temperature")),
        max_new_tokens=_max_new_tokens(given.get("--max-new-tokens")),
        plain="--plain" in given,
        base=given.get(BASE),
    )


def _temperature(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"--temperature is {text!r}, but must be a number of at least 0.")
    return value


def _max_new_tokens(text: str | None) -> int:
    if text is None:
        return 512
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"--max-new-tokens is {text!r}, but must be a whole number above 0.")
    return int(text)

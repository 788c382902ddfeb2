"""Makes the pictures in docs/images by running the command, as it is, in a terminal of its own.

    python docs/make_screenshots.py      # about two minutes

Each picture is what a terminal emulator shows of a real run with the tiny configurations.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

IMAGES = Path(__file__).parent / "images"

_COLUMNS, _LINES = 110, 40

_WRONG = """\
model: {name_or_path: runs/tiny_pretrain/model, dtype: float16}
lora: {r: 16, alpha: 32}
data:
  dataset: {class_path: ChatJSON, init_args: {path: tiny/questions.jsonl}}
  sequence_len: 128
train: {epochs: 3, micro_batch_sise: 4}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-3}}
output_dir: runs/mine
"""

# rich's own frame, without the fonts that it would load from elsewhere.
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)

_COLOR_NAMES = {"brown": "yellow", "brightbrown": "bright_yellow"}

ReadyToShow = Callable[[str], bool]


def main() -> None:
    """Run everything in a directory that is deleted afterwards."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            _make_all()
        finally:
            os.chdir(here)


def _make_all() -> None:
    _run(module="thunder_memsave.configs.tiny")
    Path("wrong.yaml").write_text(_WRONG, encoding="utf-8")
    shoot("train tiny_pretrain", "progress", when=_steps_done(0.6))
    shoot("train tiny_lora", "finished")
    shoot("train wrong.yaml", "error")
    shoot("configs list", "configs_list")
    _run("configs", "copy", "tiny_lora", "mine.yaml")
    shoot("validate mine.yaml --output_dir=runs/mine", "validate")
    shutil.copy("runs/tiny_pretrain/loss.png", IMAGES / "loss.png")


def _run(*arguments: str, module: str = "thunder_memsave") -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def shoot(arguments: str, name: str, *, when: ReadyToShow | None = None) -> None:
    """Run the command; picture the first screen that is ready to be shown, or else the last."""
    screen = pyte.Screen(_COLUMNS, _LINES)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ thunder-memsave {arguments}\r\n".encode())
    is_taken = False
    for output in _outputs(shlex.split(arguments)):
        stream.feed(output)
        if when is not None and not is_taken and when(_text(screen)):
            _write(screen, arguments, name)
            is_taken = True
    if not is_taken:
        if when is not None:
            sys.exit(f"{name}: no screen was as expected; the last one:\n{_text(screen)}")
        _write(screen, arguments, name)


def _steps_done(share: float) -> ReadyToShow:
    """Wait for `<steps>/<all steps>` on the screen, after this share of them."""

    def is_ready(text: str) -> bool:
        found = re.findall(r"\b(\d+)/(\d+)\b", text)
        return any(int(done) >= share * int(total) > 0 for done, total in found)

    return is_ready


def _outputs(arguments: list[str]) -> Iterator[bytes]:
    """Yield what the command writes to a terminal, piece by piece."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
    command = [sys.executable, "-m", "thunder_memsave", *arguments]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        with suppress(OSError):  # what Linux says when the other side has closed
            while output := os.read(ours, 4096):
                yield output
    os.close(ours)


def _write(screen: pyte.Screen, arguments: str, name: str) -> None:
    console = Console(width=_COLUMNS, record=True, file=io.StringIO())
    for line in _used_lines(screen):
        console.print(line, soft_wrap=False)
    title = f"thunder-memsave {arguments}"
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id=name)
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"{name}.svg").write_text(_FONT_FACE.sub("", svg), encoding="utf-8")


def _text(screen: pyte.Screen) -> str:
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


def _used_lines(screen: pyte.Screen) -> list[Text]:
    last = max(row for row, line in enumerate(screen.display) if line.strip())
    # One more, because rich cuts off the descenders of the last one.
    return [_line(screen, row) for row in range(last + 2)]


def _line(screen: pyte.Screen, row: int) -> Text:
    characters = [screen.buffer[row][column] for column in range(_COLUMNS)]
    text = Text(no_wrap=True)
    for style, run in groupby(characters, key=_style):
        text.append("".join(character.data for character in run), style)
    text.rstrip()
    return text


def _style(character: pyte.screens.Char) -> Style:
    return Style(
        color=_color(character.fg),
        bgcolor=_color(character.bg),
        bold=character.bold,
        italic=character.italics,
        underline=character.underscore,
        reverse=character.reverse,
    )


def _color(name: str) -> str | None:
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    name = _COLOR_NAMES.get(name, name)
    return name.replace("bright", "bright_", 1) if name.startswith("bright") else name


if __name__ == "__main__":
    main()

"""Names of our commands in other fine-tuning tools, for users who switch."""

from __future__ import annotations

from collections.abc import Iterable

from thunder_memsave.settings.problems import suggestion

_TRAIN, _MERGE = "train CONFIG", "export RUN --out DIR --merge"
_VALIDATE, _COPY = "validate CONFIG", "configs copy NAME"

FOREIGN_COMMANDS: dict[str, str] = {
    **dict.fromkeys(("finetune", "finetune_lora", "finetune_full", "sft", "lora", "full"), _TRAIN),
    **dict.fromkeys(("tune", "run", "fit", "pretrain", "start"), _TRAIN),
    **dict.fromkeys(("merge", "merge_lora", "merge_adapter", "fuse"), _MERGE),
    **dict.fromkeys(("save", "convert", "convert_from_litgpt"), "export RUN --out DIR"),
    **dict.fromkeys(("check", "preprocess", "lint", "dry_run"), _VALIDATE),
    **dict.fromkeys(("estimate", "estimate_memory", "memory"), "plan CONFIG"),
    **dict.fromkeys(("ls", "list", "recipes"), "configs list"),
    **dict.fromkeys(("cp", "copy", "fetch", "init", "new"), _COPY),
    **dict.fromkeys(("inference", "generate", "ask", "repl", "infer"), "chat RUN"),
    "cat": "configs show NAME",
    "resume": f"{_TRAIN} --resume=auto",
    "version": "--version",
}
"""Other tools' commands -> ours for the same, with its arguments."""


def suggested_command(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence: the command that is probably meant, or else all there are.

    Args:
        name: What was typed in place of a command.
        known: Our commands.
    """
    known = list(known)
    here = FOREIGN_COMMANDS.get(name.lower().replace("-", "_"))
    if here is not None:
        return f"; here it is 'thunder-memsave {here}'."
    nearest = suggestion(name, known)
    return nearest if nearest != "." else f"; there are {', '.join(known)}."

"""A key of another fine-tuning tool, and what it is here."""

from __future__ import annotations

from dataclasses import dataclass

AXOLOTL, LITGPT, TORCHTUNE, TRAINER, UNSLOTH = "axolotl", "litgpt", "torchtune", "TRL", "unsloth"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignName:
    """A key of another tool."""

    tools: tuple[str, ...]

    here: tuple[str, ...] = ()
    """Our keys for it, dotted; empty if there is no equivalent."""

    note: str = ""
    """The difference to ours, or why there is no equivalent."""

    def explain(self, key: str) -> str:
        """Return a sentence that says what to write instead of this key."""
        if not self.here:
            return f"{key} is {self._whose()}, and not supported here: {self.note}."
        note = f" ({self.note})" if self.note else ""
        here = " and ".join(self.here)
        if not self.tools:
            return f"{key} is {here} here{note}."
        return f"{key} is {self._whose()}; here it is {here}{note}."

    def _whose(self) -> str:
        if len(self.tools) == 1:
            return f"{self.tools[0]}'s name"
        return f"the name in {', '.join(self.tools[:-1])} and {self.tools[-1]}"

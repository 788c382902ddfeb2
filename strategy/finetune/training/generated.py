"""Lets the model answer prompts of the validation set at evaluations, by the compiled forward that it trains with.

So sharded, quantised and fp8 weights are used as they are, without a copy. Each token takes a forward of one whole row:
there is no cache of keys and values.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from thunder_memsave.finetune.data.packing import Rows
from thunder_memsave.finetune.data.prompts import Prompt
from thunder_memsave.finetune.data.tokenize import IGNORED, Sample, pad_id_of
from thunder_memsave.finetune.model.documents_apart import MaskKind
from thunder_memsave.finetune.objectives.causal_lm import model_inputs
from thunder_memsave.finetune.objectives.loss_in_model import GENERATION
from thunder_memsave.finetune.output.run_directory import write_text

_log = logging.getLogger(__name__)

_TOKENS_BETWEEN = 8
"""Tokens between two checks whether to go on; each check is a collective."""
_MOST_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What is generated at each evaluation, and where it is written."""

    prompts: Sequence[Prompt]
    tokenizer: Any
    path: Path
    """A file of JSON lines: `step`, `prompt`, `answer`, `expected`."""
    mask: MaskKind
    length: int
    """Tokens of a row: prompt and answer are no longer."""
    max_new_tokens: int
    ends: frozenset[int]
    """Tokens that end an answer."""

    @torch.no_grad()
    def at(
        self,
        fabric: Fabric,
        model: nn.Module,
        *,
        step: int,
        is_cut_short: Callable[[], bool] = lambda: False,
    ) -> None:
        """Answer all prompts with the most probable tokens; rank 0 shows the first and writes all. A collective.

        Args:
            fabric: All its ranks call the model alike, and take rank 0's tokens.
            model: The result of `fabric.setup`, with `next_token` in its model (`put_loss_in`); in eval mode meanwhile.
            step: Optimizer steps that were taken; what the file has of this one and later ones is replaced.
            is_cut_short: Tells whether to stop; called on all ranks together, with the same answer.
        """
        was_training = model.training
        model.eval()
        found: list[dict[str, Any]] = []
        for prompt in self.prompts:
            answer = self._answer(fabric, model, prompt, is_cut_short)
            if answer is None:
                break
            found.append({"step": step, **self._texts(prompt, answer)})
        model.train(was_training)
        if fabric.is_global_zero and found:
            try:
                self._write(found, step)
            except OSError as error:  # the run goes on, as without its other tables
                _log.warning("%s cannot be written: %s", self.path, error)
            print(_shown(found[0]), flush=True)

    def _answer(
        self, fabric: Fabric, model: nn.Module, prompt: Prompt, is_cut_short: Callable[[], bool]
    ) -> list[int] | None:
        """Return the tokens of an answer without the one that ends it; None if it was cut short."""
        start = len(prompt.tokens)
        end = min(start + self.max_new_tokens, self.length)
        inputs = self._inputs(fabric, prompt.tokens, end)
        answer: list[int] = []
        for place in range(start - 1, end - 1):
            if len(answer) % _TOKENS_BETWEEN == 0 and is_cut_short():
                return None
            at = torch.tensor([place], device=fabric.device)
            token: Tensor = fabric.broadcast(getattr(model, GENERATION)(inputs=inputs, place=at))
            number = int(token)
            if number in self.ends:
                break
            answer.append(number)
            inputs["input_ids"][0, place + 1] = token[0]
        return answer

    def _inputs(self, fabric: Fabric, tokens: Sequence[int], end: int) -> dict[str, Any]:
        """Lay out a row; its document is as long as the answer may become, since no token sees a later one."""
        pad = pad_id_of(self.tokenizer)
        ids = np.full(end, pad, dtype=np.int32)
        ids[: len(tokens)] = tokens
        sample = Sample(input_ids=ids, targets=np.full(end, IGNORED, dtype=np.int32))
        rows = Rows(samples=[sample], places=[[0]], length=self.length, num_documents=1, pad_id=pad)
        return model_inputs(rows.lay_out([0]).to(fabric.device), mask=self.mask)

    def _texts(self, prompt: Prompt, answer: Sequence[int]) -> dict[str, str]:
        decode = self.tokenizer.decode
        return {
            "prompt": decode(prompt.tokens),
            "answer": decode(answer, skip_special_tokens=True),
            "expected": decode(prompt.expected, skip_special_tokens=True),
        }

    def _write(self, found: Sequence[dict[str, Any]], step: int) -> None:
        lines = [*self._earlier(step), *(json.dumps(each, ensure_ascii=False) for each in found)]
        write_text(self.path, "".join(f"{line}\n" for line in lines))

    def _earlier(self, step: int) -> Iterator[str]:
        """Yield the lines of earlier steps; a run that goes on from a checkpoint makes the others again."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if (number := _step_of(line)) is not None and number < step:
                yield line


def _step_of(line: str) -> int | None:
    """Return the step of a line; None of one that was not written here."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _shown(found: dict[str, Any]) -> str:
    prompt = " ".join(found["prompt"].split())
    beginning = f"...{prompt[-_MOST_SHOWN:]}" if len(prompt) > _MOST_SHOWN else prompt
    answer = " ".join(found["answer"].split())
    shown = f"{answer[:_MOST_SHOWN]}..." if len(answer) > _MOST_SHOWN else answer
    return f"answer after step {found['step']}: {beginning!r} -> {shown!r}"

"""A plan for which equal layers are captured and traced once is the plan of the whole trace, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from thunder_memsave.compiler import compile_call
from thunder_memsave.finetune.plan.plan_progress import Progress
from thunder_memsave.finetune.plan.plan_run import plan_run
from thunder_memsave.finetune.plan.plan_text import as_json
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.frontend import lowering
from thunder_memsave.planner.devices import DEVICES


def planned(run_file: str, num_layers: int, *words: str) -> dict[str, Any]:
    layers = f"--model.architecture.num_hidden_layers={num_layers}"
    config = load_run_config(run_file, [layers, *words])
    made = plan_run(config, device=DEVICES["h100"], num_ranks=2, has_curve=False)
    found = as_json(made, Progress())
    del found["cpu_seconds"]
    return found


WORDS: dict[str, tuple[str, ...]] = {"lora": (), "full": ("--lora=null",)}
LONG = [(number, kind) for number in (8, 14, 80) for kind in WORDS]


@pytest.mark.parametrize(
    ("num_layers", "kind"),
    [
        (4, "full"),
        pytest.param(4, "lora", marks=pytest.mark.soak),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in LONG),
    ],
)
def test_it_is_the_plan_of_the_whole_trace(
    run_file: str, num_layers: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = WORDS[kind]
    found = planned(run_file, num_layers, *words)
    monkeypatch.setattr(compile_call, "capture_few_layers", lambda *_, **__: None)
    monkeypatch.setattr(lowering, "equal_layers", lambda *_: None)
    assert planned(run_file, num_layers, *words) == found

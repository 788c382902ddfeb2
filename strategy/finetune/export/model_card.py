"""Writes the README of an adapter: what it was trained on, how, and the lines that load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_CARD = """\
---
base_model: {base_quoted}
library_name: peft
tags:
- {method}
---

# An adapter of {base}

{facts}

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{directory}")
tokenizer = AutoTokenizer.from_pretrained("{directory}")
```

Trained by thunder-memsave.
"""


def write_card(directory: Path, facts: Mapping[str, str]) -> None:
    """Write the model card in place of peft's, whose sections are empty.

    Args:
        directory: Holds the adapter, whose `adapter_config.json` names its base and its method.
        facts: What to say of the run, by name, such as `data` -> `train.jsonl`.
    """
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    base = str(config["base_model_name_or_path"])
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    card = _CARD.format(
        base=base,
        base_quoted=json.dumps(base),
        method=str(config["peft_type"]).lower(),
        facts=f"| | |\n|---|---|\n{rows}",
        directory=directory.name,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")

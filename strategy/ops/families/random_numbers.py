"""Random numbers: operators of Thunder's torch executor without the tag of the primitives that they stand for."""

from __future__ import annotations

import torch

from thunder_memsave.ops.operation import Foreign, Operation

_UNTAGGED = ("uniform", "randn", "randint")

OPERATIONS = (
    Operation(
        name="random",
        functions=(torch.rand, torch.randn, torch.randint),
        foreign=Foreign(matches=lambda operator: operator in _UNTAGGED, draws=lambda bsym: True),
    ),
)

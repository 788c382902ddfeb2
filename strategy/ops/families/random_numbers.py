"""Random numbers: operators of Thunder's torch executor without the tag of the primitives that they stand for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_memsave.ops.operation import Call, Foreign, Operation

_UNTAGGED = ("uniform", "randn", "randint")


def _of_what_is_drawn(call: Call) -> str:
    """It draws other numbers than eager from the same state of the generator."""
    return "what other random numbers than eager's are applied to"


OPERATIONS = (
    Operation(
        name="random",
        functions=(torch.rand, torch.randn, torch.randint),
        foreign=Foreign(matches=lambda operator: operator in _UNTAGGED, draws=lambda bsym: True),
    ),
    Operation(
        name="exponential",
        functions=(Tensor.exponential_,),
        runs_torchs_own=True,
        wrong_gradient=_of_what_is_drawn,
    ),
    Operation(
        name="rrelu",
        functions=(F.rrelu, torch.rrelu, torch.rrelu_),
        runs_torchs_own=True,
        wrong_gradient=_of_what_is_drawn,
    ),
)

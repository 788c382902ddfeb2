"""transformers (5.x) installs hooks in the first call that records outputs, under a lock, which no tracer follows.

`transformers.utils.output_capturing.maybe_install_capturing_hooks` does so where a model asks a part of it for hidden
states, as SegFormer does in every call. Eager code does it once; so it is done before the model is captured again.

Delete this file when `tests/compat/test_recorded_outputs.py` says that the code can be captured.
"""

from __future__ import annotations

import importlib

from torch import nn
from torch._dynamo.exc import TorchDynamoException

_INSTALLS = "maybe_install_capturing_hooks"


def install_if_it_asks(module: nn.Module, error: TorchDynamoException) -> bool:
    """Install the hooks of transformers' models in `module` if it was refused for them, and return whether it was."""
    frames = getattr(error, "real_stack", None) or ()
    if not any(frame.name == _INSTALLS for frame in frames):
        return False
    capturing = importlib.import_module("transformers.utils.output_capturing")
    modeling = importlib.import_module("transformers.modeling_utils")
    for (
        model
    ) in module.modules():  # the outer ones first: each installs those of the models within it
        if isinstance(model, modeling.PreTrainedModel):
            getattr(capturing, _INSTALLS)(model)
    return True

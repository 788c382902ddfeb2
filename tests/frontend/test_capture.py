"""A capture holds the module's own tensors and its guards; a canary watches the private functions of torch."""

from __future__ import annotations

import gc
import inspect
import weakref

import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame

from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.frontend.calls import Call
from thunder_memsave.frontend.capture import capture


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return self.inner(x) * gain


def test_inputs_carry_the_names_and_the_very_tensors_of_the_module() -> None:
    model = Model()
    captured = capture(model, Call.of(model, (torch.randn(3, 4),), {}), reason="first call")
    named = {i.name: i for i in captured.inputs}
    parameters = {n for n, i in named.items() if i.kind == "parameter"}
    buffers = {n for n, i in named.items() if i.kind == "buffer"}
    assert parameters == {n for n, _ in model.named_parameters()}
    assert buffers == {n for n, _ in model.named_buffers()}
    assert named["inner.0.weight"].tensor is model.inner[0].weight
    assert sum(i.kind == "user" for i in captured.inputs) == 1
    assert captured.training


def test_a_call_matches_until_something_changes_and_says_what() -> None:
    model = Model()
    call = Call.of(model, (torch.randn(3, 4),), {})
    captured = capture(model, call, reason="first call")
    assert captured.matches(call)
    other = Call.of(model, (torch.randn(3, 4),), {"gain": 2.0})
    assert not captured.matches(other)
    assert "gain" in captured.why_not(other)


def test_the_callable_returns_what_the_graph_returned() -> None:
    model, x = Model().eval(), torch.randn(3, 4)
    captured = capture(model, Call.of(model, (x,), {}), reason="first call")
    run = captured.callable(lambda *inputs: (torch.tensor(7.0),))
    assert run(x).item() == 7.0


def test_a_capture_keeps_no_batch_alive() -> None:
    model, x = Model(), torch.randn(3, 4)
    alive = weakref.ref(x)
    compiled = CompiledModule(model)
    compiled(x).sum().backward()
    del x
    gc.collect()
    assert alive() is None


def test_canary_the_private_functions_of_torch_are_there() -> None:
    """capture.py names them; when torch moves them, this says so before anything else fails."""
    assert set(inspect.signature(convert_frame.fullgraph_capture).parameters) >= {
        "mod",
        "args",
        "kwargs",
    }
    output = convert_frame.CaptureOutput
    assert "compiled_fn" in inspect.signature(output.forward_callable).parameters
    guards = convert_frame.GraphCaptureOutput.build_guards
    assert set(inspect.signature(guards).parameters) >= {"code", "hooks"}
    assert callable(convert_frame.get_traced_fn)
    assert hasattr(torch._dynamo.config, "skip_nnmodule_hook_guards")

"""Captures one call of a module method as an FX graph, with the guards that decide when it may be reused.

The functions used are private to torch; the import block below is the only place that names them, and
`tests/frontend/test_capture.py` has the canary. Dynamo's own `export` discards the guards, so that a stale graph would
run after an attribute changes; here they are kept and checked on every call (about 2 us per 25 guards).
"""

from __future__ import annotations

import builtins
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor, nn
from torch._dynamo.convert_frame import fullgraph_capture, get_traced_fn
from torch._dynamo.exc import TorchDynamoException, Unsupported
from torch._dynamo.hooks import Hooks
from torch._dynamo.types import GuardFilterEntry
from torch._dynamo.utils import dynamo_timed, get_metrics_context

from thunder_memsave.compat import (
    dora_weights,
    recorded_outputs,
    stale_tensor_guards,
    wrapped_parameters,
)
from thunder_memsave.compat.costly_guards import built_quickly
from thunder_memsave.errors import CaptureError, user_frame
from thunder_memsave.frontend.calls import Call
from thunder_memsave.frontend.returned_weights import returned_from_graph
from thunder_memsave.ops.host_copies.weights import place_of, take_back
from thunder_memsave.sharding.rows import whole_shape
from thunder_memsave.sharding.sharded_parameter import is_sharded, stored_weight

_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "specialize_int": True,
        "specialize_float": True,
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": False,
        "allow_rnn": True,
        # Dynamo does not guard the hooks of submodules unless told to.
        "skip_nnmodule_hook_guards": False,
        **stale_tensor_guards.settings(),
    }
)


Trace = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One placeholder of the captured graph."""

    kind: Literal["parameter", "buffer", "user"]
    name: str
    """Dotted name in the module; the placeholder's name for user inputs."""
    tensor: Tensor
    """The parameter or buffer itself; a user input's FakeTensor (its data is not kept)."""

    @property
    def is_whole(self) -> bool:
        """Whether the tensor itself is what the graph reads: not a shard, and not a weight's stored numbers."""
        return self.kind != "parameter" or not _has_stand_in(self.tensor)


@dataclass(slots=True)
class Capture:
    """A captured graph, valid for every call that `matches`."""

    graph: torch.fx.GraphModule
    inputs: Sequence[GraphInput]
    reason: str
    """Reason for the capture: `first call`, or the guard that failed."""
    grad_enabled: bool
    _guards: Any
    _make_callable: Callable[[Callable[..., Any]], Callable[..., Any]]
    _sharded: tuple[_ShardedSlot, ...] = field(default=(), repr=False)
    _mode_of: nn.Module | None = field(default=None, repr=False)
    in_training_mode: bool = True
    """The module's training mode at capture."""
    _changed: Callable[[], str | None] = field(default=lambda: None, repr=False)
    """Tells what changed that no guard asks about; None: nothing."""

    @property
    def training(self) -> bool:
        """Whether any input needs a gradient."""
        return self.grad_enabled and any(i.tensor.requires_grad for i in self.inputs)

    def matches(self, call: Call) -> bool:
        """Return whether tracing `call` now would give this graph."""
        return (
            self._parameters_unchanged()
            and self._mode_unchanged()
            and self._changed() is None
            and bool(self._guards.check(call.frame_locals))
        )

    def why_not(self, call: Call) -> str:
        """Return the first reason why `matches` is False, in one line."""
        if not self._parameters_unchanged():
            return "requires_grad, dtype, device, sharding or tying of a parameter changed"
        if not self._mode_unchanged():
            return "train or eval mode of the module changed"
        if (changed := self._changed()) is not None:
            return changed
        result = self._guards.check_verbose(call.frame_locals)
        parts = result.verbose_code_parts
        return parts[0].split("  #")[0].strip() if parts else "a guard failed"

    def callable(self, run_graph: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method with its tensor work replaced by `run_graph(*inputs) -> outputs`."""
        return self._make_callable(run_graph)

    def with_inputs(
        self,
        module: nn.Module,
        inputs: Sequence[GraphInput],
        complete: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        changed: Callable[[], str | None],
    ) -> Capture:
        """Return the capture for a graph that was given more weights of the module.

        Args:
            module: The module whose method was captured.
            inputs: All inputs of the graph.
            complete: Returns the tensors for them, from those that the method gives.
            changed: Tells what changed that no guard asks about; None: nothing.
        """
        make_callable = self._make_callable

        def make_completing(run_graph: Callable[..., Any]) -> Callable[..., Any]:
            return make_callable(lambda *given: run_graph(*complete(given)))

        return replace(
            self,
            inputs=inputs,
            _make_callable=make_completing,
            _changed=changed,
            _sharded=_sharded_slots(module, used={id(i.tensor) for i in inputs}),
        )

    def _mode_unchanged(self) -> bool:
        """Return whether the mode is unchanged, if it matters; Dynamo guards it only where the code reads it."""
        return (
            self._mode_of is None
            or not self.training
            or self._mode_of.training is self.in_training_mode
        )

    def _parameters_unchanged(self) -> bool:
        now = [slot.parameters.get(slot.name) for slot in self._sharded]
        return all(
            p is not None
            and is_sharded(p) is slot.is_sharded
            and p is now[slot.same_as]
            and p.requires_grad is slot.requires_grad
            and p.dtype is slot.dtype
            and p.device == slot.device
            and place_of(p) == slot.place
            for p, slot in zip(now, self._sharded, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _ShardedSlot:
    """A module's slot for a sharded or fp8 parameter, and the state that the capture assumes."""

    parameters: Mapping[str, nn.Parameter | None]
    name: str
    same_as: int
    """Index of the first slot that held the same parameter: tied weights are one input of the graph."""
    requires_grad: bool
    dtype: torch.dtype
    device: torch.device
    is_sharded: bool
    place: torch.device | None
    """Where it is copied to from the host."""


def capture(
    module: nn.Module,
    call: Call,
    *,
    reason: str,
    is_guarded: bool = True,
    is_of_mode: bool = False,
    trace: Trace = lambda whole: whole(),
) -> Capture:
    """Trace `call` of a method of `module` into one graph.

    While tracing, sharded parameters, and those kept as fp8 numbers, are swapped for storage-less tensors of the full
    shape and the weight's own dtype, so that the graph has full shapes and nothing is gathered. Their guards would
    compare these stand-ins with the shards, so they are left out; `Capture.matches` makes the same checks.

    Args:
        module: The module whose method is called.
        call: The call to trace.
        reason: The reason for this capture.
        is_guarded: Whether later calls will be matched against it; guards take a third of the time.
        is_of_mode: Whether `train` and `eval` change the result beyond what the module's code reads (fp8's amax).
        trace: Gets the function that has Dynamo trace the call, and returns what Dynamo found.

    Raises:
        CaptureError: The method cannot be one graph; the message names the user's file and line.
    """
    wrapped_parameters.apply_if_imported()
    dora_weights.apply_if_imported()
    for p in module.parameters():
        if p.requires_grad and place_of(p) is not None:  # no longer frozen
            take_back(p)
    grad_enabled = torch.is_grad_enabled()
    with full_shapes(module) as originals, _dynamo_settings(), _errors_name_user_code(call):
        output = trace(lambda: _graph_of(module, call, originals))
        guards = _build_guards(output, call, swapped=originals) if is_guarded else None
        make_callable = _callable_maker(output, call)
        flat = _flat_inputs(make_callable, call)
        _refuse_rows(flat, call)
    graph = output.backend_input.graph_module
    inputs = _name_inputs(module, graph, [originals.get(id(t), t) for t in flat])
    return Capture(
        graph=graph,
        inputs=inputs,
        reason=reason,
        grad_enabled=grad_enabled,
        _guards=guards,
        _make_callable=make_callable,
        _sharded=_sharded_slots(module, used={id(i.tensor) for i in inputs}),
        _mode_of=module if is_of_mode else None,
        in_training_mode=module.training,
    )


def _graph_of(module: nn.Module, call: Call, originals: Collection[int]) -> Any:
    """Return what Dynamo makes of the call."""
    with returned_from_graph(originals):
        try:
            output = fullgraph_capture(call.target, call.args, dict(call.kwargs))
        except TorchDynamoException as error:
            if not recorded_outputs.install_if_it_asks(module, error):
                raise
            output = fullgraph_capture(call.target, call.args, dict(call.kwargs))
    if output.backend_input is None:
        raise CaptureError(f"{call.name} runs no tensor operation, so there is nothing to compile.")
    return output


def _sharded_slots(module: nn.Module, *, used: Collection[int]) -> tuple[_ShardedSlot, ...]:
    first: dict[int, int] = {}
    slots: list[_ShardedSlot] = []
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None and _has_stand_in(p) and id(p) in used:
                same_as = first.setdefault(id(p), len(slots))
                state = (p.requires_grad, p.dtype, p.device, is_sharded(p), place_of(p))
                slots.append(_ShardedSlot(owner._parameters, name, same_as, *state))
    return tuple(slots)


def _callable_maker(output: Any, call: Call) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that binds Dynamo's bytecode to the function that runs the graph.

    It keeps neither `output` nor `call`, which hold the first batch.
    """
    environment = output.graph_capture_output.get_runtime_env()
    backend_id = output.backend_input.backend_id
    # torch 2.11 wants to see the builtins among the globals too.
    known = {**vars(builtins), **output.graph_capture_output.f_globals}
    instance = get_traced_fn(call.target)[1]

    def make_callable(run_graph: Callable[..., Any]) -> Callable[..., Any]:
        forward = environment.forward_callable(backend_id, run_graph, extra_globals=known)
        return forward if instance is None else forward.__get__(instance)  # type: ignore[no-any-return]

    return make_callable


class _InputsSeen(BaseException):
    """Leaves Dynamo's bytecode before anything runs, once the graph inputs are known."""


def _flat_inputs(
    make_callable: Callable[[Callable[..., Any]], Callable[..., Any]], call: Call
) -> list[Tensor]:
    flat: list[Tensor] = []

    def record(*inputs: Tensor) -> None:
        flat.extend(inputs)
        raise _InputsSeen

    # The bytecode may set the grad mode around the graph, and is left before it restores it.
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            make_callable(record)(*call.args, **call.kwargs)
        except _InputsSeen:
            return flat
    raise AssertionError("Dynamo's bytecode did not call the graph")


def _refuse_rows(flat: Sequence[Tensor], call: Call) -> None:
    """Refuse shards that come from elsewhere than the module's parameters: a list, a closure, an argument."""
    for tensor in flat:
        if is_sharded(tensor):
            name = vars(tensor)["_parameter_name"]
            raise CaptureError(
                f"{call.name} reads the sharded parameter {name!r} from elsewhere than a module's parameters, "
                "such as a list, an argument or another model, and would get only this rank's rows. Read it as an "
                "attribute of the module that holds it, or use nn.ParameterList."
            )
        if place_of(tensor) is not None:
            raise CaptureError(
                f"{call.name} reads a weight that memory.offload_weights keeps on the host, of shape "
                f"{tuple(tensor.shape)}, from elsewhere than a module's parameters, such as a list. Read it as an "
                "attribute of the module that holds it, use nn.ParameterList, or leave its module out of "
                "memory.offload_weights."
            )


def _name_inputs(
    module: nn.Module, graph: torch.fx.GraphModule, flat: Sequence[Tensor]
) -> list[GraphInput]:
    parameters = {id(p): name for name, p in module.named_parameters()}
    buffers = {id(b): name for name, b in module.named_buffers()}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(flat), "one value per placeholder"
    inputs: list[GraphInput] = []
    for node, tensor in zip(placeholders, flat, strict=True):
        if (name := parameters.get(id(tensor))) is not None:
            inputs.append(GraphInput("parameter", name, tensor))
        elif (name := buffers.get(id(tensor))) is not None:
            inputs.append(GraphInput("buffer", name, tensor))
        else:
            inputs.append(GraphInput("user", node.name, node.meta["example_value"]))
    return inputs


@contextmanager
def full_shapes(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Swap shards and stored numbers for storage-less weights of full shape; yield id(stand-in) -> original."""
    stand_ins: dict[int, nn.Parameter] = {}
    swapped: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    originals: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None and _has_stand_in(p):
                stand_in = stand_ins.setdefault(id(p), _storage_less(p))
                originals[id(stand_in)] = p
                swapped.append((owner._parameters, name, p))
                owner._parameters[name] = stand_in
    try:
        yield originals
    finally:
        for parameters, name, p in swapped:
            parameters[name] = p


def _has_stand_in(p: Tensor) -> bool:
    """Return whether the graph reads a stand-in for this tensor: the whole weight, in its own dtype."""
    return is_sharded(p) or stored_weight(p) is not None or place_of(p) is not None


def _storage_less(p: nn.Parameter) -> nn.Parameter:
    stored = stored_weight(p)
    shape, dtype = (whole_shape(p), p.dtype) if stored is None else (stored.shape, stored.dtype)
    full = torch.empty(shape, dtype=dtype, device=place_of(p) or p.device)
    full.untyped_storage().resize_(0)
    return nn.Parameter(full, requires_grad=p.requires_grad)


@contextmanager
def _dynamo_settings() -> Iterator[None]:
    with (
        warnings.catch_warnings(),
        dynamo_config.patch(**_SETTINGS, ignore_logging_functions=_logging_functions()),
        get_metrics_context(),
        dynamo_timed("thunder_memsave_capture"),
    ):
        # Dynamo instantiates the class of a custom autograd function to trace it.
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        # Of transformers, around questions about versions: the cache is skipped, the answer is the same.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        yield


def _logging_functions() -> set[Callable[..., Any]]:
    """Return all methods of `logging.Logger`, even those that libraries add: calling one would break the graph."""
    methods = (getattr(logging.Logger, name) for name in dir(logging.Logger))
    return {warnings.warn, *(m for m in methods if callable(m) and not isinstance(m, type))}


def _build_guards(output: Any, call: Call, *, swapped: Mapping[int, nn.Parameter]) -> Any:
    def keep(entries: Sequence[GuardFilterEntry]) -> list[bool]:
        return [id(entry.value) not in swapped for entry in entries]

    hooks = Hooks(guard_filter_fn=keep) if swapped else None
    code = get_traced_fn(call.target)[0].__code__
    with built_quickly():
        return output.graph_capture_output.build_guards(code, hooks=hooks).guard_manager


@contextmanager
def _errors_name_user_code(call: Call) -> Iterator[None]:
    try:
        yield
    except TorchDynamoException as error:
        raise CaptureError(_capture_message(call, error)) from error


def _capture_message(call: Call, error: TorchDynamoException) -> str:
    where = user_frame(getattr(error, "real_stack", None))
    what = str(error.msg if isinstance(error, Unsupported) else error).strip().splitlines()
    summary = " ".join(line.strip() for line in what[:3] if line.strip())
    start = f"{call.name} cannot be captured as one graph"
    if re.search("data[- ]dependent", summary, re.IGNORECASE):
        return (
            f"{start}: the code depends on the numbers in a tensor (at {where}), which differ from call to call. "
            "Compute with torch.where or a mask instead of a branch, or move that code out of the compiled method. "
            f"PyTorch says: {summary}"
        )
    return (
        f"{start}: {summary} (at {where}). "
        "Move that code out of the compiled method, or make it independent of tensor values;"
    )

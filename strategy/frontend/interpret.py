"""The alternative frontend: Thunder's interpreter, instead of Dynamo, traces the Python code of a method.

It takes some models that Dynamo breaks on, is several times slower, and refuses current transformers models. Its own
prologue's checks decide when a trace is reused; checks of sharded parameters are rewritten to the shards' shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import thunder
import torch
from thunder.common import CompileData, transform_to_torch_types
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.proxies import DistParallelType, TensorProxy, variableify
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors.passes import transform_for_execution
from thunder.executors.pythonex import ex as python_executor
from thunder.extend import Executor
from thunder.transforms.utils import get_checks
from torch import nn

from thunder_memsave.compat.foreign_messages import first_line
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import CaptureError
from thunder_memsave.frontend.capture import Call, full_shapes
from thunder_memsave.frontend.lowering import Lowered
from thunder_memsave.frontend.modes import in_language
from thunder_memsave.ops.unshard import unshard
from thunder_memsave.sharding.sharded_parameter import is_sharded


@dataclass(frozen=True, slots=True)
class Interpretation:
    """A traced method, valid for every call that `matches`."""

    lowered: Lowered
    compile_data: CompileData
    reason: str
    grad_enabled: bool
    _prologue: Callable[..., Any]
    _epilogue: Callable[..., Any]

    def matches(self, call: Call) -> bool:
        """Return whether Thunder's prologue accepts the call."""
        if torch.is_grad_enabled() is not self.grad_enabled or _autocasts():
            return False
        try:
            self._prologue(*call.args, **call.kwargs)
        except Exception:  # each check raises its own type of error
            return False
        return True

    def why_not(self, call: Call) -> str:
        """Return the first reason why `matches` is False."""
        if torch.is_grad_enabled() is not self.grad_enabled:
            return "grad mode changed"
        try:
            self._prologue(*call.args, **call.kwargs)
        except Exception as error:
            return first_line(error)
        return "autocast was turned on"

    def callable(self, run_graph: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method with its tensor work replaced by `run_graph(*inputs) -> outputs`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            inputs, to_epilogue = self._prologue(*args, **kwargs)
            return self._epilogue(*to_epilogue, *run_graph(*inputs))

        return run


def interpret(
    module: nn.Module,
    call: Call,
    *,
    reason: str,
    executors: Sequence[Executor],
    data_parallel: DataParallel | None,
) -> Interpretation:
    """Trace `call` of `module` with Thunder's interpreter.

    Raises:
        CaptureError: The interpreter cannot trace the code, or the call needs a feature of `frontend: dynamo`.
    """
    _refuse(module, call)
    jitted = thunder.jit(module, executors=executors)  # only its tracing is used
    data, stats = jitted._lc_cd, jitted._lc_cs

    @thunder._with_cache_info_ctx  # type: ignore[untyped-decorator]
    def trace() -> Any:
        data.populate_cache_info(thunder._get_cache_info(), *call.args, **call.kwargs)
        return data.acquire_initial_trace(
            module, call.args, dict(call.kwargs), data, stats, data.executors_list[0]
        )

    prologue, computation, epilogue = _traces(module, trace)
    parameters = _parameters(prologue)
    computation = _unshard_inputs(module, computation, parameters, data_parallel)
    _check_shards(module, prologue)
    executed = transform_for_execution(prologue, (python_executor,))
    run_prologue = executed.python_callable(include_decorators=False)

    @thunder._with_cache_info_ctx  # type: ignore[untyped-decorator]
    def checked_inputs(*args: Any, **kwargs: Any) -> Any:
        data.populate_cache_info(thunder._get_cache_info(), *args, **kwargs)
        with compile_data_and_stats(jitted._lc_cd, stats):  # by way of `jitted`: its parts are weak
            return run_prologue(*args, **kwargs)

    return Interpretation(
        lowered=_lowered(computation, parameters),
        compile_data=data,
        reason=reason,
        grad_enabled=torch.is_grad_enabled(),
        _prologue=checked_inputs,
        _epilogue=transform_to_torch_types(epilogue, translate_all=True).python_callable(),
    )


def _traces(module: nn.Module, trace: Callable[[], Sequence[TraceCtx]]) -> Sequence[TraceCtx]:
    """Return the prologue, the computation and the epilogue that `trace` makes of the module's full shapes."""
    with full_shapes(module):
        try:
            return trace()
        except Exception as error:
            raise CaptureError(
                f"{type(module).__name__}.forward cannot be interpreted: {error}. "
                "strategy.frontend: dynamo captures more models, and faster."
            ) from error


def _refuse(module: nn.Module, call: Call) -> None:
    if call.target is not module:
        raise CaptureError(
            "strategy.frontend: interpreter compiles forward only; marked methods and LightningModule steps need "
            "frontend: dynamo."
        )
    if _autocasts():
        raise CaptureError(
            "strategy.frontend: interpreter does not support torch.autocast (precision bf16-mixed, 16-mixed); use "
            "frontend: dynamo, or bf16-true."
        )


def _parameters(prologue: TraceCtx) -> dict[str, str]:
    """Map proxy names to parameter names."""
    return {
        bsym.output.name: bsym.args[1]
        for bsym in prologue.bound_symbols
        if bsym.sym is prims.unpack_parameter
    }


def _check_shards(module: nn.Module, prologue: TraceCtx) -> None:
    """Make the prologue check each sharded parameter for its shard's shape."""
    named = dict(module.named_parameters(remove_duplicate=False))
    for name, (check, _) in get_checks(prologue).items():
        parameter = named.get(name)
        if parameter is not None and is_sharded(parameter):
            proxy, _, *rest = check.args
            check.args = (proxy, tuple(parameter.shape), *rest)


def _unshard_inputs(
    module: nn.Module,
    computation: TraceCtx,
    parameters: dict[str, str],
    data_parallel: DataParallel | None,
) -> TraceCtx:
    """Replace each parameter by the gathered value of its shard."""
    if data_parallel is None:
        return computation
    training = torch.is_grad_enabled() and any(a.requires_grad for a in _tensors(computation))
    new = from_trace(computation)
    new.bound_symbols, swap, arguments = [], {}, []
    with tracectx(new), in_language():
        for argument in computation.args:
            name = parameters.get(argument.name)
            if name is None:
                arguments.append(argument)
                continue
            parameter = module.get_parameter(name)
            shard = _shard_proxy(argument, parameter)
            arguments.append(shard)
            kind = shard.distparallel_type
            full = unshard(shard, data_parallel, kind, training=training)
            if full.shape != argument.shape:
                full = full[: argument.shape[0]]
            swap[variableify(argument)] = full
    unpack = [prims.unpack_trivial.bind(a, name=a.name, output=a) for a in arguments]
    body = (b for b in computation.bound_symbols if b.sym is not prims.unpack_trivial)
    new.bound_symbols = [
        *unpack,
        *new.bound_symbols,
        *(b.from_bsym_swap_proxies(swap, skip_output=True) for b in body),
    ]
    new.args = tuple(arguments)
    new._siginfo = SigInfo.from_name_and_args("computation", new.args)
    return new


def _shard_proxy(full: TensorProxy, parameter: nn.Parameter) -> TensorProxy:
    kind = DistParallelType.FULLY_SHARDED if is_sharded(parameter) else DistParallelType.REPLICATED
    return TensorProxy(
        f"{full.name}_shard",
        shape=tuple(parameter.shape),
        device=full.device,
        dtype=full.dtype,
        requires_grad=full.requires_grad,
        distparallel_type=kind,
    )


def _lowered(computation: TraceCtx, parameters: dict[str, str]) -> Lowered:
    names = (a.name.removesuffix("_shard") for a in computation.args)
    return Lowered(
        trace=computation,
        constants=(),
        input_names=tuple(parameters.get(name, name) for name in names),
        depends_on=None,
        training=torch.is_grad_enabled() and any(a.requires_grad for a in _tensors(computation)),
        outputs=lambda inputs, computed: computed,
    )


def _tensors(trace: TraceCtx) -> list[TensorProxy]:
    return [a for a in trace.args if isinstance(a, TensorProxy)]


def _autocasts() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))

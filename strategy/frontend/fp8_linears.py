"""Lowers the fp8 linears of a captured graph."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor, fx
from torch.nn.functional import linear

from thunder_memsave.aten.whole_calls import call_whole
from thunder_memsave.fp8.compute.late_linear import LateLinear
from thunder_memsave.fp8.compute.linears import Fp8Linear, Fp8Linears, StatePart
from thunder_memsave.fp8.compute.losses import LossOperators, LossSettings
from thunder_memsave.fp8.compute.symbols import (
    Computation,
    LinearOperators,
    StateProxies,
    dequantized,
)
from thunder_memsave.fp8.weights.frozen import refuse_trained_again
from thunder_memsave.frontend.capture import Capture
from thunder_memsave.frontend.fx_nodes import node_callable, value_needs_grad
from thunder_memsave.frontend.rewrites.late_logits import InFp8
from thunder_memsave.ops.families.linear_cross_entropy import (
    linear_cross_entropy,
    with_usual_index,
)
from thunder_memsave.ops.families.loss_sums import Wanted
from thunder_memsave.ops.location import module_name
from thunder_memsave.sharding.sharded_parameter import unquantized_dtype

_log = logging.getLogger(__name__)


class LinearNodes:
    """The nodes of one graph that compute in fp8, and the state that its trace reads for them."""

    def __init__(self, linears: Fp8Linears, capture: Capture, target: torch.device | None) -> None:
        """Find the fp8 linears; `target`: the device of every tensor, for a plan; None: the tensor's own."""
        self._linears, self._capture, self._target = linears, capture, target
        self._records = capture.training and capture.in_training_mode
        self._linear_of = dict(_found(linears, capture))
        if capture.training and not self._records:
            self._warn_of_eval_mode()
        read = {id(i.tensor) for i in capture.inputs}
        self._kept = [f for f in linears.by_name.values() if f.is_kept_in_fp8]
        for kept in self._kept:
            refuse_trained_again(kept.name, kept.linear.weight)
        self._parts = {
            found.name: found.parts(
                training=capture.training, transposed=self._has_input_gradient(found)
            )
            for found in self._linear_of.values()
        }
        for kept in self._kept:  # their weights are read by other operations than fp8 linears
            if kept.name not in self._parts and id(kept.linear.weight) in read:
                self._parts[kept.name] = ("weight_scale_inv",)
        self._kept_and_read = [
            f for f in dict.fromkeys(self._linear_of.values()) if f.is_kept_in_fp8
        ]
        self._places = self._places_of_state()
        self._proxies: dict[str, StateProxies] = {}

    def proxies(self) -> tuple[TensorProxy, ...]:
        """Make the trace's arguments for the state, in the order of `tensors`."""
        made: list[TensorProxy] = []
        for name, parts in self._parts.items():
            linear = self._linears.by_name[name]
            own = {part: self._proxy(linear, part, len(made) + i) for i, part in enumerate(parts)}
            self._proxies[name] = StateProxies(**own)
            made += own.values()
        return tuple(made)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the current state, for one call."""
        if self._records:
            self._linears.note_recorded()
        linears = self._linears.by_name
        return tuple(
            linears[name].read(part) for name, parts in self._parts.items() for part in parts
        )

    @property
    def has_tiled_losses(self) -> bool:
        """Whether the loss of a linear can be computed in tiles of tokens."""
        return self._linears.recipe.scaling != "nvfp4"

    def computes(self, node: fx.Node) -> bool:
        """Return whether the node is a linear in fp8, or the loss of one."""
        return node in self._linear_of

    def late(self, node: fx.Node) -> InFp8:
        """Return how a linear runs after the call, for a loss that is joined to it."""
        found = self._linear_of[node]
        linear = LateLinear(self._computation(found), node.meta["example_value"].dtype)
        scale = None if found.state is None else partial(found.read, "forward_scale")
        return InFp8(linear, scale)

    def join(self, linear: fx.Node, loss: fx.Node) -> None:
        """Let `loss`, a call of `linear_cross_entropy`, compute in place of a linear too."""
        self._linear_of[loss] = self._linear_of.pop(linear)

    def call(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Compute the node on tensors without numbers, as a call that stays whole.

        Autocast changes only the dtype of the result: the input is cast to it, the weight is quantised uncast.
        """
        linear = self._linear_of[node]
        if node.target is linear_cross_entropy:
            return self._loss(linear, args, kwargs)
        x, weight, bias = _operands(args, kwargs)
        rule = _InFp8(self._computation(linear), linear.name, self)
        x = x.to(node.meta["example_value"].dtype)
        return call_whole(rule, x, weight, *(() if bias is None else (bias,)))

    def _loss(self, linear: Fp8Linear, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Compute the loss of a linear, as a call that stays whole."""
        x, weight, bias, targets = args
        given = (x, weight, bias)
        is_enabled = torch.is_grad_enabled()
        wanted = Wanted(*(is_enabled and t is not None and t.requires_grad for t in given))
        names = ("reduction", "label_smoothing", "soft_cap", "logit_scale", "dtype")
        settings = LossSettings(**{name: kwargs[name] for name in names}, wanted=wanted)
        targets = with_usual_index(targets, kwargs["ignore_index"])
        operands = (x.to(settings.dtype), weight, bias, targets, kwargs["num_kept"])
        are_there = tuple(t is not None for t in operands)
        rule = _LossInFp8(self._computation(linear), settings, linear.name, self, are_there)
        loss = call_whole(rule, *(t for t in operands if t is not None))
        return loss.to(kwargs["loss_dtype"])

    def kept_weights(self) -> list[Tensor]:
        """Return the weights of which linears read the fp8 numbers that are kept."""
        return [kept.linear.weight for kept in self._kept_and_read]

    def state_among(self, name: str, others: Sequence[TensorProxy]) -> StateProxies:
        """Return the state of a linear.

        Args:
            name: The linear's.
            others: Proxies of `tensors`, then of the numbers of `kept_weights`.
        """
        places = self._places[name]
        return StateProxies(**{part: others[place] for part, place in places.items()})

    def _places_of_state(self) -> dict[str, dict[StatePart, int]]:
        """Number the state of each linear as `state_among` is given it."""
        number = count()
        places = {name: {p: next(number) for p in parts} for name, parts in self._parts.items()}
        for kept in self._kept_and_read:
            places[kept.name]["weight"] = next(number)
        return places

    def _computation(self, linear: Fp8Linear) -> Computation:
        return Computation(
            backend=self._linears.backend,
            recipe=self._linears.recipe,
            records=self._records,
            is_frozen=linear.is_frozen,
            has_backward=self._capture.training,
        )

    def weight_itself(self, tensor: Tensor, numbers: TensorProxy) -> TensorProxy:
        """Record the dequantised weight, for an operation that is not an fp8 linear.

        Args:
            tensor: The parameter, kept as fp8 numbers.
            numbers: All of its fp8 numbers, gathered.
        """
        linear = next(f for f in self._kept if f.linear.weight is tensor)
        scale_inv = self._proxies[linear.name].weight_scale_inv
        assert scale_inv is not None
        return dequantized(numbers, scale_inv, dtypes.to_dtype(unquantized_dtype(tensor)))

    def _warn_of_eval_mode(self) -> None:
        if any(linear.state is not None for linear in self._linear_of.values()):
            _log.warning(
                "%s computes gradients in eval mode, where fp8 records no amax, so its scales do not follow these "
                "steps; call model.train() before training.",
                self._linears.owner,
            )

    def _has_input_gradient(self, linear: Fp8Linear) -> bool:
        nodes = (n for n, found in self._linear_of.items() if found is linear)
        return self._capture.training and any(
            value_needs_grad(n.all_input_nodes[0].meta.get("example_value")) for n in nodes
        )

    def _proxy(self, linear: Fp8Linear, part: StatePart, number: int) -> TensorProxy:
        tensor = linear.read(part)
        return TensorProxy(
            f"fp8_{number}_{part}",
            shape=tuple(tensor.shape),
            device=devices.to_device(self._target or tensor.device),
            dtype=dtypes.to_dtype(tensor.dtype),
            requires_grad=False,
        )


@dataclass(frozen=True, slots=True)
class _InFp8:
    """The rule by which a linear in fp8 is one call: `(input, weight, bias if it has one) -> result`."""

    computation: Computation
    name: str
    nodes: LinearNodes

    def result(self, tensors: Sequence[Tensor]) -> Tensor:
        x, weight = tensors[:2]
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    def gradients(self, grad: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [t.new_empty(t.shape) for t in tensors]

    def record(
        self, operands: Sequence[TensorProxy], others: Sequence[TensorProxy]
    ) -> tuple[TensorProxy, LinearOperators]:
        x, weight, *bias = operands
        state = self.nodes.state_among(self.name, others)
        found = LinearOperators(self.computation, x, weight, next(iter(bias), None), state)
        return found.forward(), found

    def record_backward(
        self, grad: TensorProxy, saved: LinearOperators
    ) -> Sequence[TensorProxy | None]:
        return saved.gradients(grad)

    def is_as(self, other: Any) -> bool:
        return self is other


@dataclass(frozen=True, slots=True)
class _LossInFp8:
    """The rule by which the loss of a linear is one call.

    It is of hidden states, weight, bias, targets and their number, as far as they are there.
    """

    computation: Computation
    settings: LossSettings
    name: str
    nodes: LinearNodes
    are_there: tuple[bool, ...]

    def result(self, tensors: Sequence[Tensor]) -> Tensor:
        x, _, _, targets, _ = self._all(tensors)
        shape = targets.shape if self.settings.reduction == "none" else ()
        return x.new_empty(shape, dtype=torch.float32)  # type: ignore[no-any-return]

    def gradients(self, grad: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [t.new_empty(t.shape) if t.is_floating_point() else None for t in tensors]

    def record(
        self, operands: Sequence[TensorProxy], others: Sequence[TensorProxy]
    ) -> tuple[TensorProxy, LossOperators]:
        state = self.nodes.state_among(self.name, others)
        found = LossOperators(self.computation, self.settings, self._all(operands), state)
        return found.forward(), found

    def record_backward(
        self, grad: TensorProxy, saved: LossOperators
    ) -> Sequence[TensorProxy | None]:
        gradients = (*saved.gradients(grad), None, None)
        return [g for g, is_there in zip(gradients, self.are_there, strict=True) if is_there]

    def is_as(self, other: Any) -> bool:
        return self is other

    def _all(self, given: Sequence[Any]) -> list[Any]:
        """Return what is given, with None for what is not there."""
        found = iter(given)
        return [next(found) if is_there else None for is_there in self.are_there]


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the input, the weight and the bias."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    return given["input"], given["weight"], given.get("bias")


def _found(linears: Fp8Linears, capture: Capture) -> Iterator[tuple[fx.Node, Fp8Linear]]:
    """Yield the fp8 nodes with their linears. A weight that is computed or passed in belongs to no linear."""
    graph = capture.graph
    placeholders = (n for n in graph.graph.nodes if n.op == "placeholder")
    tensors = {n: i.tensor for n, i in zip(placeholders, capture.inputs, strict=True)}
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if not node.op.startswith("call_") or node_callable(node) is not linear:
                continue
            weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
            name = module_name(node.meta.get("nn_module_stack"))
            if weight in tensors and (found := linears.find(name, tensors[weight])) is not None:
                yield node, found

"""Makes steps of a plain module, and keeps everything that they change: numbers by name, and what are no numbers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from beside_eager import NUM_RANKS, DiffersError, Values, inner, named_parameters, relative
from plain_kinds import Plain
from plain_kinds.registry import Batch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_iter

from thunder_memsave.sharding.sharded_parameter import as_rows

NUM_STEPS = 2
RATE = 0.05
Backward = Callable[[Tensor], object]


@dataclass
class Record:
    """What steps computed and left behind."""

    values: Values = field(default_factory=dict)
    """Outputs, gradients, inputs, buffers and parameters, by names that say which."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Types, numbers of Python, what was printed."""

    def add(self, value: Any, name: str) -> None:
        """Take the tensors of a value apart, and note the rest."""
        for where, leaf in _leaves(value, name):
            if isinstance(leaf, Tensor):
                self.values[where] = as_rows(leaf).detach().clone()
                self.facts[where] = (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            else:
                self.facts[where] = leaf


def trained(
    model: Any, optimizer: Any, batches: Sequence[Batch], backward: Backward = Tensor.backward
) -> Record:
    """Take a step for each batch."""
    record = Record()
    for number, batch in enumerate(batches, 1):
        step(model, batch, backward, record, f"step {number}: ")
        optimizer.step()
        optimizer.zero_grad()
    leave_behind(model, record)
    return record


def trained_on_ranks(
    models: Sequence[nn.Module], batches: Sequence[Sequence[Batch]], rank: int
) -> Record:
    """Take the steps of copies whose gradients are averaged, and return what `rank` sees.

    Batch norms begin each forward in training with rank 0's statistics, as under DDP.

    Args:
        models: One copy for each rank.
        batches: Those of each rank.
        rank: Whose record is returned.
    """
    optimizers = [torch.optim.SGD(m.parameters(), RATE) for m in models]
    records = [Record() for _ in models]
    for number in range(NUM_STEPS):
        prefix = f"step {number + 1}: "
        for model in models[1:]:
            _take_statistics(model, models[0])
        for model, mine, record in zip(models, batches, records, strict=True):
            step(model, mine[number], Tensor.backward, record, prefix)
        for together in zip(*(named_parameters(m) for m in models), strict=True):
            _average(together, records, prefix)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    leave_behind(models[rank], records[rank])
    return records[rank]


def _take_statistics(model: nn.Module, first: nn.Module) -> None:
    for own, norm in zip(model.modules(), first.modules(), strict=True):
        if isinstance(own, _BatchNorm) and own.training:
            own.load_state_dict(norm.state_dict())


def step(model: Any, batch: Batch, backward: Backward, record: Record, prefix: str) -> None:
    """Call the model, and compute gradients; all but the optimizer's part."""
    torch.manual_seed(1)
    output = called(model, batch, record, prefix)
    loss = loss_of(output)
    backward(loss)
    record.add(loss, f"{prefix}loss")
    for name, value in _leaves(batch, "input"):
        if isinstance(value, Tensor):
            record.add(value.detach(), f"{prefix}{name} afterwards")
            record.add(value.grad, f"{prefix}gradient of {name}")
    for name, p in named_parameters(model):
        record.add(None if p.grad is None else p.grad, f"{prefix}gradient of {name}")


def called(model: Any, batch: Batch, record: Record, prefix: str) -> Any:
    """Call the model, and note the output and what was printed."""
    named = dict(batch)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        output = model(*named.pop("args", ()), **named)
    record.add(output, f"{prefix}output")
    record.facts[f"{prefix}printed"] = printed.getvalue()
    return output


def leave_behind(model: Any, record: Record) -> None:
    """Note parameters, buffers, and what modules keep in attributes of Python's own types."""
    own = inner(model)
    record.add(dict(own.named_parameters()), "parameter ")
    record.add(dict(own.named_buffers()), "buffer ")
    for name, module in own.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and _is_plain(value):
                record.facts[f"attribute {name}.{key}"] = copy.deepcopy(value)


def loss_of(output: Any) -> Tensor:
    """Return the mean square of every differentiable output, each number weighted by its place."""
    tensors = [v for _, v in _leaves(output, "") if isinstance(v, Tensor) and v.requires_grad]
    return torch.stack([_weighted(v) for v in tensors]).sum()


def _weighted(value: Tensor) -> Tensor:
    value = torch.view_as_real(value) if value.is_complex() else value
    value = value.float() if value.dtype.itemsize < 4 else value
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
    return (value.square() * weights).mean().double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all records."""
    return torch.optim.SGD(model.parameters(), RATE)


def batches_of(plain: Plain, rank: int = 0) -> list[Batch]:
    """Return the batches of the steps of a rank."""
    return [plain.batch(1 + number * NUM_RANKS + rank) for number in range(NUM_STEPS)]


def refuse_other_facts(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse records of which something that is no number differs.

    Raises:
        DiffersError: it does; the message says what.
    """
    for name in [*expected, *(n for n in found if n not in expected)]:
        if name not in found or name not in expected:
            raise DiffersError(f"{name} is there on one side only")
        if expected[name] != found[name]:
            raise DiffersError(f"{name} is {found[name]!r}, eager's is {expected[name]!r}")


def finite(values: Values) -> Values:
    """Return numbers that differences can be taken of: infinities and NaN become numbers that are all their own."""
    return {n: _finite(v) for n, v in values.items()}


def _finite(value: Tensor) -> Tensor:
    value = torch.view_as_real(value) if value.is_complex() else value
    if not value.is_floating_point():
        return value.double()
    largest = torch.finfo(value.dtype).max
    return (
        value if value.isfinite().all() else value.nan_to_num(7e7, posinf=largest, neginf=-largest)
    )


def refuse_other_bits(expected: Values, found: Values) -> None:
    """Refuse numbers of other bits.

    Raises:
        DiffersError: there are such.
    """
    for name, values in finite(expected).items():
        other = finite({name: found[name]})[name]
        if not torch.equal(values, other):
            raise DiffersError(f"{name} has other bits, by {relative(values, other):.1e}")


def _average(together: Sequence[tuple[str, nn.Parameter]], records: Any, prefix: str) -> None:
    """Give the parameters of all copies the mean of their gradients; where one has none, it counts as zeros."""
    name = together[0][0]
    grads = [p.grad for _, p in together if p.grad is not None]
    if grads:
        mean = torch.stack(grads).sum(0) / len(together)
        for _, p in together:
            p.grad = mean.clone()
    for (_, p), record in zip(together, records, strict=True):
        record.add(p.grad, f"{prefix}gradient of {name}")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what a nested value holds, and the types of its containers."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value):
        items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    else:
        yield name, value
        return
    yield f"{name}'s type", type(value).__name__
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}")


def _is_plain(value: Any) -> bool:
    return all(isinstance(v, (bool, int, float, str, type(None))) for v in tree_iter(value))

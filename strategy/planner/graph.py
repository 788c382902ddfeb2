"""One training step as plain data: storages, operations, and the order in which they run.

A storage is memory that tensors share: a tensor, its views and its aliases are one. A `TrainingGraph` is what a plan
is made for: every operation once, forward before backward. A `Program` is what runs: operations in their final order,
those that are computed again twice, and after each the storages that die.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from thunder_memsave.planner.actions import Actions

_PRECISION = 2e-6
"""Of a bound: the solver's, and what is taken off for it."""

StorageKind = Literal[
    "parameter",  # a parameter, or this rank's rows of it
    "buffer",  # buffers and constants
    "batch",  # what the caller passes to each call
    "gathered",  # a whole parameter that a collective made, or what a parameter's cast or transpose made of it
    "activation",  # made in forward
    "cotangent",  # gradients of the outputs, that the caller passes to backward
    "gradient",  # made in backward and returned: parameters' gradients
    "temporary",  # made in backward otherwise
]

Repeat = Literal["free", "yes", "replay", "no"]
"""Whether an operation can be computed again: `free` moves no data (a view); `yes` gives the same bits; `replay`
draws random numbers, and gives the same ones from a saved generator state; `no`: it communicates (but for gathers of
parameters, which are `yes`), writes to what exists, reads what is overwritten later, leaves the device, or is a view
that also reads other storages. A storage that a `no` makes, or a part of whose values one does, is kept wherever
backward or what is computed again reads it. The passes refuse no operation that a graph does not call `no`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Memory that lives and dies as one."""

    nbytes: int
    """As the allocator of the device is asked for; an empty one has 0."""
    kind: StorageKind
    name: str
    """Of the first value in it: a trace's name, unique in a graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation of a trace. Storages are given as indices into the graph's."""

    symbol: str
    """Its name in the trace."""
    index: int
    """Its position among the bound symbols of the trace that it was extracted from."""
    arguments: tuple[str, ...]
    """Names of the tensors that it reads."""
    results: tuple[str, ...]
    """Names of the tensors that it makes."""
    reads: tuple[int, ...]
    """Storages of `arguments`, each once."""
    makes: tuple[int, ...]
    """Storages that it allocates and that outlive it; a view makes none."""
    peak_bytes: int
    """The most that it holds at once of what it allocates, results and temporaries inside together; at least what
    `makes` sums to."""
    scratch_bytes: int = 0
    """Of `peak_bytes`, memory that kernels take without a tensor, as measured or bounded; 0 where not known."""
    repeat: Repeat = "yes"
    flops: int = 0
    """Multiplications and additions, as torch's FlopCounterMode counts."""
    moved_bytes: int = 0
    """Read from and written to device memory, by all kernels inside."""
    sent_bytes: int = 0
    """Received from other ranks."""
    dtype: str = ""
    """Of the first result: decides which peak rate applies."""
    key: str = ""
    """Equal for operations that cost the same: symbol, shapes, strides, dtypes, numbers. Keys the measured costs."""
    source: str = ""
    """`file:line` of the user's code, empty where unknown."""
    module: str = ""
    """Name of the module that ran it, such as `model.layers.3.mlp.down_proj`; empty where unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingGraph:
    """Forward and backward of one call, each operation once, nothing computed again yet.

    Ops before `num_forward` are forward, in the order in which they run; the others are backward.
    """

    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    num_forward: int
    storage_of: Mapping[str, int]
    """Storage of every tensor of the trace by its name."""
    inputs: frozenset[int]
    """Storages of arguments: parameters, buffers, the batch. The caller holds them all the time."""
    outputs: frozenset[int]
    """Storages of forward's results. The caller holds them until backward ends."""
    gradients: frozenset[int]
    """Storages that backward returns: they live from where they are made to the end."""
    cotangents: frozenset[int]
    """Storages that the caller makes before backward begins, and holds until it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation as it runs."""

    op: Op
    makes: tuple[int, ...]
    """Storages of the program; those of an operation that is computed again are others than the first time's."""
    frees: tuple[int, ...]
    """Storages that die after it, results that nobody reads among them."""
    is_repeated: bool = False
    """Whether forward has computed this before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What runs, in order, and what it holds."""

    storages: tuple[Storage, ...]
    steps: tuple[Step, ...]
    num_forward: int
    """Steps before this index are forward. Cotangents appear between the two."""
    held: frozenset[int]
    """Storages that are there before the first step, and are not freed: arguments."""
    cotangents: frozenset[int] = frozenset()
    """Storages that appear before the first step of backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """What a training step holds besides the tensors of the compiled forward and backward. All in bytes."""

    gradient_bytes: int = 0
    """Gradients that exist before backward: 0 where it makes them, all of them under gradient accumulation."""
    optimizer_bytes: int = 0
    """The optimizer's state."""
    other_bytes: int = 0
    """Parameters and buffers of the module that this call does not read, other models, anything that stays."""
    between_bytes: int = 0
    """The most that the caller allocates between forward and backward, beside forward's outputs: its loss, and what it
    differentiates of that, the gradients of the outputs among it."""
    update_peak_bytes: int = 0
    """The most that clipping and `optimizer.step()` allocate beside what is there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Rates of a device for costs from a roofline."""

    name: str
    flops_per_s: Mapping[str, float]
    """By dtype, such as `bfloat16`, for matrix products without sparsity."""
    memory_bytes_per_s: float
    network_bytes_per_s: float
    """Of one rank's all-gathers and reduce-scatters."""
    launch_us: float
    """Least time of one operation."""
    memory_bytes: int | None = None
    """What the device has; None: not a limit that is planned for."""
    compute_capability: tuple[int, int] | None = None
    """CUDA's, which says what is computed in fp8; None: no CUDA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Why a plan has the action that it has for one storage, and what that takes."""

    name: str
    nbytes: int
    cost_us: float
    """Time of computing it again, alone; what several share is counted with the first."""
    reason: str
    source: str
    module: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What happens to what backward needs of forward, and what that costs."""

    actions: Actions
    """By name, of every storage of forward that is read in backward, also to compute others again; arguments and
    outputs, which are there anyway, are not among them."""
    budget_bytes: int | None
    """None: no limit."""
    predicted_peak_bytes: int
    keep_all_peak_bytes: int
    """With nothing computed again but what is free."""
    saved_bytes: int
    """Of kept storages that are neither arguments nor outputs."""
    recompute_us: float
    lower_bound_us: float
    """No plan with this order of operations that computes each operation again at most once is faster, and leaves as
    much room as passes after the plan were seen to need; 0 where that is not known."""
    decisions: Sequence[Decision] = field(default=())
    layered_bound_us: float = 0.0
    """No plan is faster in which no layer computes again what the layer after it reads; 0 where that is not known.
    Not a bound on all plans, but near the fastest of all unless the budget is very small."""
    costs: str = ""
    """Where the times of operations come from, in words."""

    @property
    def layered_gap(self) -> float:
        """As `gap`, of plans in which layers compute nothing again for others; infinite where nothing is known."""
        if self.gap == 0.0 or self.recompute_us <= self.layered_bound_us:
            return 0.0
        return self.recompute_us / self.layered_bound_us - 1.0 if self.layered_bound_us else inf

    @property
    def gap(self) -> float:
        """Time of computing again beyond the lower bound, as a fraction of that; infinite where none is known.

        0 where the solver, which is not exact, cannot tell them apart.
        """
        if self.recompute_us <= self.lower_bound_us * (1 + _PRECISION):
            return 0.0
        return self.recompute_us / self.lower_bound_us - 1.0 if self.lower_bound_us > 0 else inf

"""One training step as plain data: storages, operations, and the order in which they run.

A storage is memory that tensors share: a tensor, its views and its aliases are one. A `TrainingGraph` is what a plan
is made for: every operation once, forward before backward. A `Program` is what runs: operations in their final order,
recomputed ones twice, and after each the storages that die.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, TypeAlias

from thunder_memsave.planner.actions import Actions

_PRECISION = 2e-6
"""Relative precision of a bound: the solver's tolerance and the safety margin for it."""

FETCH = "fetch_weight"
"""Name in traces of the operation that copies a frozen weight from the host."""

COMPRESS, DECOMPRESS = "compress_to_fp8", "decompress_from_fp8"
"""Names in traces of the operations that store an activation in fewer bits, and that make it of them."""

THEN = " then "
"""Between the keys of operations that count as one: the time of all is that of each."""

UPDATE = "update_parameter"
"""Name in traces of the operation that updates a weight in backward."""

StorageKind = Literal[
    "parameter",  # a parameter, or this rank's shard of it
    "host",  # a parameter that stays on the host, with no bytes of the device
    "buffer",  # buffers and constants
    "batch",  # arguments that the caller passes to each call
    "gathered",  # an all-gathered parameter, or a cast or transpose of a parameter
    "activation",  # made in forward
    "cotangent",  # gradients of the outputs, that the caller passes to backward
    "gradient",  # made in backward and returned: gradients of parameters
    "temporary",  # everything else that backward makes
]

Repeat = Literal["free", "yes", "replay", "no"]
"""The way to recompute an operation: `free` moves no data (a view); `yes` gives the same bits; `replay` draws random
numbers, and gives the same ones from a saved generator state; `no`: it communicates (except gathers of parameters,
which are `yes`), writes in place, reads what is overwritten later, leaves the device, or is a view that also reads
other storages. A storage that holds a result of a `no` is kept if backward or a recomputation reads it. Passes can
recompute every operation that is not `no`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Memory that is allocated and freed as one."""

    nbytes: int
    """Bytes that the device's allocator counts; 0 for an empty tensor."""
    kind: StorageKind
    name: str
    """The trace's name of the first value in it, unique in a graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation of a trace. Storages are indices into the graph's."""

    symbol: str
    """Name of the symbol in the trace."""
    index: int
    """Position among the bound symbols of the trace that it was extracted from."""
    arguments: tuple[str, ...]
    """Names of the tensors that it reads."""
    results: tuple[str, ...]
    """Names of the tensors that it makes."""
    reads: tuple[int, ...]
    """Storages of `arguments`, each once."""
    makes: tuple[int, ...]
    """Storages that it allocates and that outlive it; a view makes none."""
    peak_bytes: int
    """Peak of the bytes that it allocates, results and temporaries together; at least the sum of `makes`."""
    scratch_bytes: int = 0
    """Part of `peak_bytes` that kernels allocate without a tensor, as measured or bounded; 0 if not known."""
    repeat: Repeat = "yes"
    flops: int = 0
    """Multiplications and additions, as torch's FlopCounterMode counts."""
    moved_bytes: int = 0
    """Bytes that its kernels read from and write to device memory."""
    beside_bytes: int = 0
    """The part of `moved_bytes` that kernels without products move, in an operation that has products too: they run one
    after the other."""
    sent_bytes: int = 0
    """Bytes received from other ranks."""
    copied_bytes: int = field(default=0, repr=False)
    """Bytes that it copies between the device and the host, beside what computes. Not in its text, of which plans' keys
    are made: of a graph that is planned, only fetches have some, the bytes of what they make."""
    dtype: str = ""
    """Dtype of the first result: decides which peak rate applies."""
    key: str = ""
    """Key of the measured costs: equal for operations with equal symbol, shapes, strides, dtypes and numbers."""
    rides: bool = field(default=False, repr=False)
    """Whether its recomputation takes no time, as it is part of a kernel of backward that runs anyway (`riding.py`)."""
    joins: str = field(default="", repr=False)
    """A result of the kernel of backward of which its recomputation is a part, once a product that reads it has moved
    behind that kernel; empty: it has one of its own."""
    joined_bytes: int = field(default=0, repr=False)
    """Bytes that its recomputation moves there."""
    alone: Op | None = None
    """What forward runs instead, for less, where this is recomputed; None: itself. So recomputing it costs as much more
    as this one takes."""
    source: str = ""
    """`file:line` of the user's code, empty where unknown."""
    module: str = ""
    """Name of the module that called it, such as `model.layers.3.mlp.down_proj`; empty where unknown."""

    @property
    def communicates(self) -> bool:
        """Whether it brings bytes from elsewhere: from other ranks, or a weight from the host."""
        return bool(self.sent_bytes) or self.symbol == FETCH


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingGraph:
    """Forward and backward of one call before recomputation: each operation once.

    Ops before `num_forward` are forward, in the order in which they run; the others are backward.
    """

    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    num_forward: int
    storage_of: Mapping[str, int]
    """Storage of every tensor of the trace by its name."""
    inputs: frozenset[int]
    """Storages of arguments: parameters, buffers, the batch. Live all the time."""
    outputs: frozenset[int]
    """Storages of forward's results. Live until backward ends."""
    gradients: frozenset[int]
    """Storages that backward returns. Live from where they are made to the end."""
    cotangents: frozenset[int]
    """Storages that the caller makes before backward begins. Live until it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation as it runs."""

    op: Op
    makes: tuple[int, ...]
    """Storages of the program that the operation makes; a recomputed operation makes new ones."""
    frees: tuple[int, ...]
    """Storages that die after it, including results that nothing reads."""
    is_repeated: bool = False
    """True for a recomputed operation of forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The operations of a step in the order in which they run, and their storages."""

    storages: tuple[Storage, ...]
    steps: tuple[Step, ...]
    num_forward: int
    """Number of forward's steps, which come first. Cotangents become live after them."""
    held: frozenset[int]
    """Storages of arguments: live before the first step and never freed."""
    cotangents: frozenset[int] = frozenset()
    """Storages that become live before the first step of backward."""
    outputs: frozenset[int] = frozenset()
    """Storages of what the call returns, which the caller may keep."""


Allocations: TypeAlias = tuple[int, ...]
"""Allocations and frees in order: a number above 0 is the bytes of an allocation, one below 0 frees an earlier
one: -3 the third that was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateMemory:
    """What the update of a parameter takes that backward makes; alike for all of one shape and dtype."""

    shape: tuple[int, ...]
    dtype: str
    peak_bytes: int = 0
    """Peak of the bytes that it allocates, beside the optimizer's states."""
    moved_bytes: int = 0
    """Bytes that its kernels read and write."""
    states_bytes: int = 0
    """Bytes of the optimizer's states that are on the host, and on the device for the update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes that a training step holds besides the tensors of the compiled forward and backward."""

    gradient_bytes: int = 0
    """Bytes of gradients that exist before backward: 0, or those of all parameters under gradient accumulation."""
    optimizer_bytes: int = 0
    """Bytes of optimizer state on the device."""
    host_bytes: int = 0
    """Bytes of optimizer state on the host."""
    states_on_host: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Shapes and dtypes of the parameters whose states are to go there; empty: none but those that are there."""
    other_bytes: int = 0
    """Bytes of everything else that stays: parameters and buffers that this call does not read, other models."""
    between_bytes: int = 0
    """Peak of the bytes that the caller allocates between forward and backward, beside forward's outputs: its loss and
    the backward of that, the gradients of the outputs included."""
    update_peak_bytes: int = 0
    """Peak of the bytes that clipping and `optimizer.step()` allocate beside what is live already."""
    updates: tuple[UpdateMemory, ...] = ()
    """Those that backward makes, each once; then the bytes above are for the rest of the update."""
    loss_allocations: Allocations = field(default=(), compare=False, repr=False)
    """The allocations of `between_bytes`; what they leave are the gradients of the outputs. No plan depends on them,
    nor on the next ones; empty if they are not known."""
    update_allocations: tuple[Allocations, ...] = field(default=(), compare=False, repr=False)
    """Those of the first update, which leaves the optimizer's state, and of the second, which counts on from the
    first."""

    def with_update_of(self, other: StepMemory) -> StepMemory:
        """Return the memory of this step with another's states and update."""
        return replace(
            self,
            optimizer_bytes=other.optimizer_bytes,
            host_bytes=other.host_bytes,
            states_on_host=other.states_on_host,
            update_peak_bytes=other.update_peak_bytes,
            update_allocations=other.update_allocations,
            updates=other.updates,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sustained:
    """Fractions of the data sheet's rates that kernels sustain.

    FlashAttention-2 reaches 35 % of an H100's peak, and cuDNN's attention 53 % forward and 43 % backward, with heads of
    128 numbers (Shah et al. 2024, FlashAttention-3, arXiv:2407.08608). The others are usual for large bfloat16 products
    of cuBLAS, and for pointwise kernels. An optimizer's states, copied in and out at once with their updates between,
    reached 32 GB/s each way on an H200 (docs/gpu.md).
    """

    products: float = 0.66
    memory: float = 0.79
    attention_forward: float = 0.35
    attention_backward: float = 0.30
    cudnn_forward: float = 0.53
    cudnn_backward: float = 0.43
    states: float = 0.58
    """The part of the rate to the host at which they are copied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Rates of a device for costs from a roofline."""

    name: str
    flops_per_s: Mapping[str, float]
    """FLOP/s of dense matrix products by dtype, such as `bfloat16`."""
    memory_bytes_per_s: float
    network_bytes_per_s: float
    """Bandwidth of one rank's all-gathers and reduce-scatters."""
    launch_us: float
    """Least time of one operation."""
    memory_bytes: int | None = None
    """Memory of the device; None: not a limit that is planned for."""
    compute_capability: tuple[int, int] | None = None
    """CUDA's compute capability, which says what runs in fp8; None: no CUDA."""
    host_bytes_per_s: float = 0.01e12
    """Bandwidth of copies between one device and page-locked memory of the host, each way; both ways run at once."""
    devices_per_link: int = 1
    """Devices of a node that share this bandwidth, as two behind one PCIe switch do."""
    ranks_of_node: int = 1
    """Ranks that run on a node, a device each."""
    copy_us: float = 10.0
    """Least time of one such copy."""
    host_memory_bytes: int | None = None
    """Memory of the host per device; None: that of the machine."""
    sustained: Sustained = field(default_factory=Sustained)

    @property
    def copied_bytes_per_s(self) -> float:
        """Bandwidth of copies to the host or back that one rank has while those beside it copy too."""
        return self.host_bytes_per_s / min(self.devices_per_link, self.ranks_of_node)

    @property
    def as_plain(self) -> Device:
        """The same as other processes can be sent: read-only mappings cannot."""
        return replace(self, flops_per_s=dict(self.flops_per_s))

    def among(self, num_ranks: int) -> Device:
        """Return the device of one of several ranks of a node."""
        return replace(self, ranks_of_node=num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The reason for one storage's action, and its cost."""

    name: str
    nbytes: int
    cost_us: float
    """Time to recompute it alone; operations that several storages share are counted with the first."""
    reason: str
    source: str
    module: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The actions for all storages that backward needs, and their costs."""

    actions: Actions
    """Action by name, for every storage of forward that backward or a recomputation reads, except arguments and
    outputs, which are live anyway."""
    budget_bytes: int | None
    """None: no limit."""
    predicted_peak_bytes: int
    keep_all_peak_bytes: int
    """Peak if only what takes no time is recomputed."""
    saved_bytes: int
    """Bytes of kept storages that are neither arguments nor outputs, without those on the host."""
    recompute_us: float
    """Time to recompute what this plan recomputes, and plans that keep all do not."""
    lower_bound_us: float
    """Lower bound on `added_us` of all plans within the budget that keep this order of operations and recompute
    each at most once, with the room that later passes were seen to need; 0 if not known."""
    decisions: Sequence[Decision] = field(default=())
    costs: str = ""
    """Source of the operations' times, in words."""
    found_by: str = ""
    """Name of the search that found it."""
    offloaded_bytes: int = 0
    """Bytes of the storages that wait for backward on the host."""
    exposed_us: float = 0.0
    """Time in which nothing computes because a copy from or to the host has not ended."""
    copies_within_bytes: int | None = None
    """The peak up to which copies hold device memory to run beside what computes; None: no limit."""

    @property
    def added_us(self) -> float:
        """Time that staying within the budget costs: recomputing, and waiting for copies."""
        return self.recompute_us + self.exposed_us

    @property
    def gap(self) -> float:
        """Time added beyond the lower bound, as a fraction of that bound; infinite if no bound is known.

        0 where the solver, which is not exact, cannot tell them apart. Where no activations are copied, what waits does
        so for states or weights, which no plan of the same call changes much: it is left out.
        """
        added_us = self.added_us if self.actions.offloaded else self.recompute_us
        if added_us <= self.lower_bound_us * (1 + _PRECISION):
            return 0.0
        return added_us / self.lower_bound_us - 1.0 if self.lower_bound_us > 0 else inf

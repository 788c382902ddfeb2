"""Estimates the device memory of a rank that PyTorch's allocator does not see: CUDA's context and nccl's buffers.

The bytes of a buffer are those of nccl 2.30.7's source (github.com/NVIDIA/nccl, commit 5067397c). How many there are
depends on the machine's links, and is meant as an upper bound; no device has confirmed the sum. Users' `NCCL_*`
variables are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thunder_memsave.planner.graph import Device

_KIB, _MIB = 2**10, 2**20

CONTEXT_BYTES = 512 * _MIB
"""CUDA's context, with the kernels that a step loads: an estimate, the driver decides."""

_NUM_STEPS = 8  # src/include/device.h:26
_LL_BYTES = 8 * 512 * _NUM_STEPS * 16  # device.h:97-98, init.cc:810
_LL128_BYTES = 120 * 640 * _NUM_STEPS * 8  # device.h:114-115, init.cc:812
_SIMPLE_BYTES = 4 * _MIB  # init.cc:813
_GRANULARITY = 2 * _MIB  # comm.h:46

_RECEIVES_FROM = -(-(_LL_BYTES + _LL128_BYTES + _SIMPLE_BYTES) // _GRANULARITY) * _GRANULARITY
"""Buffers of the three protocols, for each neighbour and channel (transport/p2p.cc:486-490, net.cc:1101): 10 MiB,
which eight H100 also logged (NVIDIA/nccl issue 1685)."""
_SENDS_WITHIN_NODE = _GRANULARITY
"""Only counters (p2p.cc:407-411), 2 MiB in that log."""
_SENDS_TO_NETWORK = -(-(_LL128_BYTES + _SIMPLE_BYTES) // _GRANULARITY) * _GRANULARITY
"""net.cc:917: the third protocol's buffer is the host's."""
_NUM_NEIGHBOURS = 2
"""In a ring, and in a tree whose part within a node is a chain, to both of which a rank sends and from both of which
it receives (graph/connect.cc)."""

_NUM_CHANNELS = {(8, 0): 24, (9, 0): 24, (10, 0): 32}
"""Twice the rings that fill the links of a node with a switch (graph/search.cc:1057-1068, connect.cc:460), by compute
capability."""
_NUM_CHANNELS_WITHOUT_SWITCH = 4
_MULTICAST_CHUNKS_BYTES = {9: 16 * 128 * _KIB, 10: 24 * 256 * _KIB}
"""Channels and the bytes of a chunk, the most of any number of nodes, by the first number of the capability
(transport/nvls.cc:155-198)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Where the ranks of a communicator are."""

    ranks_per_node: int
    num_nodes: int


def outside_bytes(
    device: Device, *, num_ranks: int, ranks_per_node: int, shard_size: int | None = None
) -> dict[str, int]:
    """Return the estimated bytes by what holds them; empty on the CPU.

    Args:
        device: The device of each rank.
        num_ranks: Number of ranks.
        ranks_per_node: How many of them share a node.
        shard_size: Ranks of one group of hybrid sharding; None: there are no such groups.
    """
    if device.compute_capability is None:
        return {}
    groups = groups_of(num_ranks, ranks_per_node, shard_size)
    found = {"CUDA's context": CONTEXT_BYTES}
    if nccl := sum(communicator_bytes(device, group) for group in groups):
        found["nccl's buffers"] = nccl
    return found


def groups_of(num_ranks: int, ranks_per_node: int, shard_size: int | None) -> Iterator[Group]:
    """Yield the groups of a rank that communicate on the device: those of `make_data_parallel`, and the default one."""
    if num_ranks == 1:
        return
    everyone = Group(ranks_per_node=ranks_per_node, num_nodes=-(-num_ranks // ranks_per_node))
    yield everyone  # the default group
    yield everyone
    if shard_size is None or shard_size == num_ranks:
        return
    yield Group(
        ranks_per_node=min(shard_size, ranks_per_node), num_nodes=-(-shard_size // ranks_per_node)
    )
    apart = max(ranks_per_node // shard_size, 1)
    yield Group(ranks_per_node=apart, num_nodes=num_ranks // shard_size // apart)


def communicator_bytes(device: Device, group: Group) -> int:
    """Return the estimated bytes of a communicator that has reduced and gathered; 0 if it has one rank."""
    if group.ranks_per_node * group.num_nodes == 1:
        return 0
    assert device.compute_capability is not None, "nccl is for CUDA"
    sends = _SENDS_WITHIN_NODE if group.num_nodes == 1 else _SENDS_TO_NETWORK
    num_channels = _NUM_CHANNELS.get(device.compute_capability, _NUM_CHANNELS_WITHOUT_SWITCH)
    connections = num_channels * _NUM_NEIGHBOURS * (_RECEIVES_FROM + sends)
    return connections + _multicast_bytes(device.compute_capability[0], group)


def _multicast_bytes(major: int, group: Group) -> int:
    """Return the bytes through which a switch reduces for the ranks of a node (nvls.cc:426-430)."""
    if group.ranks_per_node == 1:
        return 0
    return 2 * _NUM_STEPS * _MULTICAST_CHUNKS_BYTES.get(major, 0) * group.ranks_per_node

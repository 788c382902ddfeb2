"""What CUDA and nccl hold beside PyTorch's allocator is estimated from nccl's source."""

from __future__ import annotations

import pytest

from thunder_memsave.measure.outside_memory import (
    CONTEXT_BYTES,
    Group,
    communicator_bytes,
    groups_of,
    outside_bytes,
)
from thunder_memsave.planner.devices import device

M = 2**20
NODE = Group(ranks_per_node=8, num_nodes=1)


@pytest.mark.parametrize(
    ("name", "group", "nbytes"),
    [
        # 24 channels, 2 neighbours, 10 MiB to receive and 2 MiB to send; 16 chunks of 128 KiB, 8 steps, both ways.
        ("h100", NODE, (24 * 2 * (10 + 2) + 2 * 8 * 2 * 8) * M),
        ("h100", Group(ranks_per_node=2, num_nodes=1), (24 * 2 * (10 + 2) + 2 * 8 * 2 * 2) * M),
        ("a100", NODE, 24 * 2 * (10 + 2) * M),
        ("l40s", NODE, 4 * 2 * (10 + 2) * M),
        # To other nodes a rank sends from its own memory.
        ("h200", Group(ranks_per_node=8, num_nodes=4), (24 * 2 * 20 + 2 * 8 * 2 * 8) * M),
        ("h200", Group(ranks_per_node=1, num_nodes=4), 24 * 2 * 20 * M),
        ("b200", NODE, (32 * 2 * (10 + 2) + 2 * 8 * 6 * 8) * M),
        ("h200", Group(ranks_per_node=1, num_nodes=1), 0),
    ],
)
def test_a_communicator_has_buffers_for_each_channel_and_neighbour(
    name: str, group: Group, nbytes: int
) -> None:
    assert communicator_bytes(device(name), group) == nbytes


def test_hybrid_sharding_has_two_more_communicators() -> None:
    everyone = Group(ranks_per_node=8, num_nodes=4)
    assert [*groups_of(32, 8, None)] == [everyone, everyone]
    assert [*groups_of(32, 8, 32)] == [everyone, everyone]
    assert [*groups_of(32, 8, 8)] == [
        everyone,
        everyone,
        NODE,
        Group(ranks_per_node=1, num_nodes=4),
    ]
    in_half_nodes = [*groups_of(32, 8, 4)][2:]
    assert in_half_nodes == [
        Group(ranks_per_node=4, num_nodes=1),
        Group(ranks_per_node=2, num_nodes=4),
    ]
    over_two_nodes = [*groups_of(32, 8, 16)][2:]
    assert over_two_nodes == [
        Group(ranks_per_node=8, num_nodes=2),
        Group(ranks_per_node=1, num_nodes=2),
    ]


def test_one_process_has_no_communicator_and_a_cpu_nothing_of_cuda() -> None:
    assert outside_bytes(device("h200"), num_ranks=1, ranks_per_node=1) == {
        "CUDA's context": CONTEXT_BYTES
    }
    assert outside_bytes(device("cpu"), num_ranks=8, ranks_per_node=8) == {}


def test_both_are_named() -> None:
    found = outside_bytes(device("h200"), num_ranks=8, ranks_per_node=8)
    assert found == {
        "CUDA's context": CONTEXT_BYTES,
        "nccl's buffers": 2 * communicator_bytes(device("h200"), NODE),
    }

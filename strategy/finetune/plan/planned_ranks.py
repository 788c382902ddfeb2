"""How a plan takes its ranks to be on nodes, and how many of them share a weight."""

from __future__ import annotations

from thunder_memsave.config import StrategyConfig
from thunder_memsave.distributed.process_group import size_of_shard_group


def ranks_per_node(num_ranks: int) -> int:
    """Return how many of the ranks share a node."""
    return min(num_ranks, 8)


def num_shards(strategy: StrategyConfig, num_ranks: int) -> int:
    """Return the number of ranks that share the rows of a weight.

    Raises:
        ConfigError: The size of hybrid sharding's groups does not divide the number of ranks.
    """
    if strategy.sharding.mode == "none":
        return 1
    of_node = ranks_per_node(num_ranks)
    return size_of_shard_group(strategy, num_ranks=num_ranks, ranks_per_node=of_node)

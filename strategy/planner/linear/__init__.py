"""Linear programs for the least cost within a peak, and bounds on it.

In: a graph and its choices. Out: relaxed or integer solutions, with what HiGHS proved about them.
"""

"""Linear programs for the least recompute time within a peak, and bounds on it.

In: a graph and its choices. Out: relaxed or integer solutions, with the bounds that HiGHS proved.
"""

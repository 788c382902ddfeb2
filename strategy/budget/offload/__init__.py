"""What a plan may do where it does not fit: copy values, states, weights to the host, or update weights in backward.

In: settings and rates. Out: the terms of the planner, and attempts with more and more of these.
"""

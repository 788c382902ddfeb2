"""The searches for a plan, and the order in which `solve.py` runs them.

In: a graph, costs and a budget. Out: the best plan that was found in time.
"""

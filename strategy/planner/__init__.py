"""Decides which activations to keep for backward, from plain data: no torch in here.

In: a graph of storages and operations, their costs, a budget. Out: a plan, with its simulated peak and time.
`search/` finds plans, `linear/` bounds them, `report/` shows them.
To add an action, such as `offload`, begin at `actions.py`: it lists the files that change.
"""

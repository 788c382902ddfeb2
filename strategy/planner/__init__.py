"""Decides which activations to keep for backward, from plain data: no torch in here.

In: a graph of storages and operations, their costs, a budget. Out: a plan, with its simulated peak and time.
`search/` finds plans, `linear/` bounds them, `offload/` copies to the host, `report/` shows them.
To add an action, such as keeping in fewer bits, begin at `actions.py`: it lists the files that change.
"""

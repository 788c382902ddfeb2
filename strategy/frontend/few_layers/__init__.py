"""Captures a call of a module with few of its equal layers, for a plan, and completes the graph to that of all.

In: a module whose layers are equal, and a call. Out: the capture of the whole module (`capture.py`); none where its
code might not do the same for each layer (`plain_loops.py`), or the layers are not equal (`equal_modules.py`).
"""

"""Families of operations: rows of the table with their kernels, scratch of PyTorch's own operators, and collectives.

In: nothing. Out: `OPERATIONS` and `Foreign`s, which `table.py` lists; operators of `collectives.py`, which have no row.
"""

"""Rows of tokens on disk, for data that does not fit into memory.

In: documents, one after the other. Out: the same `Rows` as of data in memory, whose samples and places are read from
files of a cache whenever a batch is laid out. `stored_data.py` makes them; `permutation.py` shuffles without a list.
"""

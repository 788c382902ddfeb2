"""The rows of the table of operations, one file per family; `table.py` lists the files.

In: nothing. Out: `OPERATIONS` of each file, with the kernels that run them.
"""

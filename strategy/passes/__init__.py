"""Passes over the joint trace: forward, then backward, with operators claimed by executors.

In: a trace. Out: the same object if there is nothing to do, else a new trace whose provenance names the pass.
`tests/passes/contract.py` checks what every pass guarantees; `compiler/pipeline.py` has their order. Thunder's split
into forward and backward runs later and derives what is saved. Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()

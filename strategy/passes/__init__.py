"""Passes over the joint trace: forward, then backward, with operators claimed by executors and nothing fused yet.

In: a trace. Out: the very same object where there is nothing to do, else a new trace whose provenance names the pass.
`tests/passes/contract.py` is what each must satisfy; `compiler/pipeline.py` has their order. Thunder's split into
forward and backward, which comes after, derives what is saved. Importing the package imports Thunder.
"""

from thunder_memsave import compat

compat.apply()

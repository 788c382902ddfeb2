"""Shards parameters by rows, and computes with the shards outside of traces.

In: a module and the ranks that share it. Out: parameters that hold this rank's rows, and ways to gather them.
A quantised parameter keeps its weight's shape; only its dtype differs from that of the weight (`unquantized_dtype`).
"""

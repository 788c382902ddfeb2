"""Chooses the fp8 linears, and casts, loads and shards their weights as fp8 numbers.

In: a module. Out: the same module, with fp8 numbers and a scale in place of frozen weights.
"""

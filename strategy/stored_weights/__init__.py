"""Keeps frozen weights of linears and experts in fewer bytes: formats of bytes and scales, and how a trace reads them.

In: a module. Out: the same module, with bytes in place of frozen weights (`sharding/quantized_parameter.py` holds
them), and one operator for each format, by which a trace reads them.
"""

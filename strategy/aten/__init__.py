"""Watches the operators that PyTorch runs: the memory that they allocate, and their floating-point operations.

In: code that runs, also on fake tensors. Out: bytes live at each moment, FLOPs.
"""

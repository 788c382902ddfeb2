"""Reads files that hold weights quantised: each is there under its own name, dequantised, and as our bytes.

In: a source of the files' tensors. Out: a source without the parts of such weights.
"""

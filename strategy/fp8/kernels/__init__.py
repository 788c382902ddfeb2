"""The fp8 operations on plain tensors by TransformerEngine or PyTorch, and the devices that each supports.

In: tensors and scales. Out: quantised, transposed and multiplied tensors.
"""

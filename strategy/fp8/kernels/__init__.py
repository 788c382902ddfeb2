"""The fp8 operations on plain tensors, by TransformerEngine or PyTorch, and what each of them supports.

In: tensors and scales. Out: quantised, transposed and multiplied tensors.
"""

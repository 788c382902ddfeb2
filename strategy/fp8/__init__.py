"""Linears that compute in fp8: recipes and scaling here; kernels, weights and the compiled linears in packages.

In: the `fp8` section. Out: the dtype and the scale of each tensor of a linear.
"""

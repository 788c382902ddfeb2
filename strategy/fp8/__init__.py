"""Linears that compute in fp8: recipes and scaling here; kernels, weights and the compiled linears in packages.

In: the `fp8` section. Out: the dtype and the scale of each tensor of a linear.

Frozen weights may be stored as numbers and scales alone: `weights/` makes them, `sharding/quantized_parameter.py` holds
them, `ops/unshard.py` gathers them, `frontend/graph_inputs.py` dequantises them, and `checkpoints/module_state.py`
checks them. Another storage format changes each of these.
"""

"""Frozen weights in NF4 with double quantisation, as in QLoRA: numbers, layout, and how a trace reads them.

In: a module. Out: the same module, with bytes in place of frozen weights (`sharding/quantized_parameter.py` holds
them), and one operator that a trace reads them by.

Source: Dettmers et al., QLoRA, 2023; the numbers are those of bitsandbytes 0.50.2 on the CPU, bit by bit.
"""

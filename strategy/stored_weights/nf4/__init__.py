"""NF4 with double quantisation, as in QLoRA: its numbers, and the layout of a weight's bytes.

Source: Dettmers et al., QLoRA, 2023; the numbers are those of bitsandbytes 0.50.2 on the CPU, bit by bit.
"""

"""The ways to carry a call out: whole or in tiles, with values in fp8 or none.

In: the joint trace of a call. Out: what a plan may choose in each way.
"""

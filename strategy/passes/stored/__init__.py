"""Passes for values that wait for backward on the host, or in fewer bits.

In: a trace, and which values a plan stores so. Out: a trace that stores them, and makes them again.
"""

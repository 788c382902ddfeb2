"""The objective of a run: how the model is called, its loss, and what is measured of it.

In: batches that `data` laid out, and the model's output. Out: the model's arguments, a loss, its weight and metrics.
A new objective is a class in a file of its own here, a subclass of `Objective`; `choose` maps a run file to it.
"""

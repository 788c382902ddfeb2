"""The model of a run: built on the meta device from a directory or the hub, with its adapter.

In: the `model` and `peft` sections. Out: a module that `materialize` can fill.
"""

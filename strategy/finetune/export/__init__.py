"""Exports a run's checkpoint as files that transformers and peft load.

In: a run's directory. Out: an adapter or a whole model, in a directory that gets its name once it is verified.
"""

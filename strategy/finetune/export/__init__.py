"""From a run's checkpoint to files that transformers and peft load.

In: a run's directory. Out: an adapter or a whole model, in a directory that has its name once it is verified.
"""

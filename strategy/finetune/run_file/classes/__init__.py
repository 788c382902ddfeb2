"""Objects that a run file names by `class_path` and `init_args`.

In: a mapping. Out: an object, or an error at its key.
"""

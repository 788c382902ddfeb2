"""The directory of a run: the paths of its files, and the checkpoint that it resumes from.

In: a `RunConfig`. Out: paths, and an error if a checkpoint belongs to another run.
"""

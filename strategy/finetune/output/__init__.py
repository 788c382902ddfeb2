"""The directory of a run: what it writes there, and which checkpoint it goes on from.

In: a `RunConfig`. Out: paths, and a refusal where a checkpoint belongs to another run.
"""

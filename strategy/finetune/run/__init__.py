"""Runs a job from its configuration to the exported model: everything is checked first, then done in order.

In: a `RunConfig`. Out: checkpoints, logs and an export, or one message about what ended it.
"""

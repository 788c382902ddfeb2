"""A run from its configuration to the exported model: checked first, then done in order.

In: a `RunConfig`. Out: checkpoints, logs and an export, or one message about what ended it.
"""

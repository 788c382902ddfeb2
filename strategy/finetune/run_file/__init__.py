"""The run file: its keys as dataclasses, and what is derived from them without torch.

In: values that `reading/` checked. Out: `RunConfig`. `keys/` knows every key, `classes/` what a `class_path` may name.
"""

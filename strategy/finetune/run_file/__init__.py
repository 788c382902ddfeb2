"""The run file: its keys as dataclasses, and values derived from them without torch.

In: values that `reading/` checked. Out: `RunConfig`. `keys/` documents every key, `classes/` handles each `class_path`.
"""

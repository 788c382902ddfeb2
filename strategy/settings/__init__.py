"""Reads sections of settings: YAML and mappings to frozen dataclasses, in plain Python.

In: text or mappings. Out: values of the annotated types, or an error that names the key.
"""

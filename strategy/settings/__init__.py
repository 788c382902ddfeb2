"""Turns YAML and mappings into frozen dataclasses of settings, in plain Python.

In: text or mappings. Out: values of the annotated types, or an error that names the key.
"""

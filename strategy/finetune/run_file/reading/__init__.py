"""Reads YAML and command-line overrides into a checked `RunConfig`, or reports all problems.

In: text. Out: `RunConfig`, without torch.
"""

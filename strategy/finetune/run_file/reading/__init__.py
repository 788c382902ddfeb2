"""From YAML and command-line overrides to a checked `RunConfig`, or a report of all problems.

In: text. Out: `RunConfig`, without torch.
"""

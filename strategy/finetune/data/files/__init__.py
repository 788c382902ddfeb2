"""The files of a data set: rows of any kind of file, and the format that the rows have.

In: JSONL, JSON, CSV, Parquet and Arrow. Out: rows as mappings, each with its place for messages.
"""

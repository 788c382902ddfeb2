"""The run file: what is written in it, what is wrong with it, and where."""

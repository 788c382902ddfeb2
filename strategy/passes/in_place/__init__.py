"""Passes about operations that write over a tensor: they keep what is read later, and write results where they can."""

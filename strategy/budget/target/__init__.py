"""Stands in for a device, and ranks, that are not here: for plans of another machine."""

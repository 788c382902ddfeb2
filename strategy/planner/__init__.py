"""Decides what backward keeps and what it computes again: pure Python on plain data, no torch, no Thunder."""

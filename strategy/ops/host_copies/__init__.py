"""Copies between the device and the host as operations of a trace, and the engines and buffers behind them.

In: tensors on the device. Out: the same bytes in buffers of the host, and back, beside what computes.
"""

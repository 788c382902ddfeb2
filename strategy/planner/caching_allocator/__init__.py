"""Simulates PyTorch's caching allocator for CUDA: the bytes that it reserves from the device for a step's tensors.

In: allocations and frees in their order. Out: allocated and reserved bytes at every moment, and their peaks.
The rules are those of `c10/cuda/CUDACachingAllocator.cpp` in torch 2.11 to 2.14; each names the function that has it.
Left out: blocks that several streams use (`record_stream`), memory pools, CUDA graphs, `garbage_collection_threshold`.
"""

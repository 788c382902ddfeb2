"""Launches a compiled call as two CUDA graphs, one of its forward and one of its backward.

    choose.py           whether: the setting, what forbids it (refusals.py), launches against kernels, bytes
          |
    graphed_call.py     when: ordinary calls first, then a capture, then replays; what makes it an ordinary call again
          |
    captured.py         one forward and its backward: static buffers, and what the two hand to each other
          |
    runtime.py          what is needed of a device; torch_runtime.py: torch.cuda's

What a replay reads:
    weights, buffers, fp8 state    where they are: their addresses are compared before each replay
    the batch, packed boundaries   copied into static buffers before each forward
    gradients of the outputs       the same, before each backward
    saved for backward             in the graphs' own pool: nobody else frees or moves it
    random numbers                 of torch's generator, whose offset each replay moves on
What leaves a graph, outputs and gradients, leaves as a copy, so that the next replay overwrites nothing that a caller
holds. Optimizers therefore see gradients of their own, wherever `.grad` is, and whether or not `zero_grad` sets it to
None; accumulation adds as it does without graphs.

What is run as without graphs: the first calls (kernels choose themselves, libraries allocate), a forward while
another one's backward is still to come, calls without gradients. A moved weight is a new capture. Another shape of the
batch is another compiled call, which has no graphs: both pools together are not planned for.
"""

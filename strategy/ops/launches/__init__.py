"""Operations of one launch each by Triton, where PyTorch would launch several kernels.

available.py      whether Triton launches anything here
losses.py         losses of logits, and their gradients in place of the logits
loss_kernels.py   the kernels of `losses.py`: importing it imports Triton
"""

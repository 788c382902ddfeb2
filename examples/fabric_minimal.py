"""Trains a small network with the strategy chosen by name; nothing else of this package is imported.

python examples/fabric_minimal.py
torchrun --nproc-per-node 2 examples/fabric_minimal.py
"""

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy

fabric = Fabric(
    strategy="thunder_memsave",
    accelerator="auto",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
)
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)

inputs = torch.randn(256, 20, device=fabric.device)
targets = inputs[:, :3].argmax(dim=1)
for step in range(60):
    loss = cross_entropy(model(inputs), targets)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19:
        fabric.print(f"step {step + 1}: loss {loss.item():.4f}")

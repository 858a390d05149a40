"""Training steps of an attention layer on packed documents that are spread over processes, on CPUs or on cards.

Run it with: python examples/context_parallel.py
         or: torchrun --nproc-per-node 2 examples/context_parallel.py

It prints the same numbers for any number of processes.
"""

import os

import torch
import torch.distributed as dist

from flashmsa.context_parallel import ContextParallel
from flashmsa.module import MSAttention

many = "WORLD_SIZE" in os.environ  # torchrun sets it
on_cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_cuda else torch.device("cpu")
if on_cuda:
    torch.cuda.set_device(device)
if many:
    dist.init_process_group("nccl" if on_cuda else "gloo")

lengths = [1500, 1, 400, 147]  # the plan cuts the long one and keeps the short ones whole
context = ContextParallel([0, 1500, 1501, 1901, 2048])
if context.rank == 0:
    print(f"{context.world} ranks with {context.plan.rows} rows; work is balanced to {context.plan.imbalance:.4f}")

torch.manual_seed(0)
layer = MSAttention(256, num_heads=4, num_kv_heads=2, head_dim=64, block_size=64, top_k=3)
inputs, targets = torch.randn(2, sum(lengths), 256)  # a real program would load this rank's rows alone
layer, inputs, targets = layer.to(device), context.shard(inputs).to(device), context.shard(targets).to(device)
optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
for step in range(6):
    out, kl = layer(inputs, context=context)
    loss = (out - targets).square().sum() / (sum(lengths) * 256)  # this rank's part of the mean over the pack
    optimizer.zero_grad()
    (loss + kl).backward()
    for parameter in layer.parameters():  # DDP or FSDP would do this; note that they average
        parameter.grad = context.sum(parameter.grad)
    optimizer.step()
    loss, kl = context.sum(loss), context.sum(kl)
    if context.rank == 0:
        print(f"step {step} loss {loss.item():.4f} KL {kl.item():.4f}")
if many:
    dist.destroy_process_group()

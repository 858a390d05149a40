"""Training steps of an attention layer on packed documents: dense warm-up of the proxies first, then sparse.

Run it with: python examples/packed_documents.py
"""

import torch

from flashmsa import MSAttention

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
lengths = [700, 1, 323]  # documents of any length lie one after the other, without padding, and do not see each other
cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
hidden_states = torch.randn(sum(lengths), 256, device=device)
target = torch.randn_like(hidden_states)

layer = MSAttention(256, num_heads=4, num_kv_heads=2, head_dim=64, block_size=64, top_k=3, mode="dense", device=device)
optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
for step in range(12):
    if step == 8:
        layer.mode = "sparse"
    out, kl = layer(hidden_states, cu_seqlens=cu_seqlens, max_seqlen=max(lengths))
    loss = (out - target).square().mean()
    optimizer.zero_grad()
    (loss + kl).backward()
    optimizer.step()
    print(f"step {step:2} {layer.mode:6} loss {loss.item():.4f} KL {kl.item():.4f}")

"""A training step in the place of Flash-MSA: only the import differs. Runs on the CPU too, slowly.

Run it with: python examples/training_step.py
"""

import torch

from flashmsa import flash_msa_func

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
torch.manual_seed(0)
batch, tokens, dim, top_k = 1, 1024, 128, 256  # top_k counts tokens here: 2 blocks of 128


def projection(heads: int) -> torch.Tensor:
    """[batch, heads, tokens, dim], as a model's projection of its hidden states would be."""
    return torch.randn(batch, heads, tokens, dim, device=device, dtype=dtype, requires_grad=True)


q, k, v, q_proxy, k_proxy = (projection(heads) for heads in (16, 2, 2, 4, 1))
out, kl_loss = flash_msa_func(q_proxy, k_proxy, q, k, v, top_k, dim**-0.5)
loss = out.float().square().mean() + kl_loss  # the KL loss trains the proxies, the rest of the loss all others
loss.backward()
print(
    f"out {tuple(out.shape)}, KL {kl_loss.item():.4f}, |dq| {q.grad.norm():.2e}, |dq_proxy| {q_proxy.grad.norm():.2e}"
)

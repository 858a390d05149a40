"""flash_msa_varlen_func and the batched functions against attention written out in PyTorch."""

from __future__ import annotations

import eager
import pytest
import torch
from conftest import Inputs, make_inputs

import flashmsa

F64 = torch.float64
BLOCK = 64


def varlen(x: Inputs, top_k: int, block_size: int = BLOCK, **options):
    longest = int((x.cu[1:] - x.cu[:-1]).max())
    return flashmsa.flash_msa_varlen_func(
        x.q, x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, longest, longest, top_k, block_size=block_size, **options
    )


def reference(x: Inputs, top_k: int, block_size: int = BLOCK, block_indices=None):
    """out, kl and lse in fp64 over the selection that the package makes for x."""
    visible, position = eager.positions(x.cu, x.cu, len(x.q), len(x.k))
    support = visible.expand(x.q_proxy.shape[1], -1, -1)
    if top_k:
        if block_indices is None:
            block_indices = flashmsa.ops.select(x.q_proxy, x.k_proxy, x.cu, x.cu, top_k, block_size)
        support = eager.selected(block_indices, visible, position, block_size)
    wide = x.clone(F64)
    return (*eager.attention(*wide.leaves(), support), wide)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("heads", [(4, 2, 2, 1), (8, 1, 4, 4), (6, 3, 1, 1), (2, 2, 2, 2)])
def test_varlen_matches_eager(device, heads, top_k):
    x = make_inputs([1, 200, 64, 129], heads, device=device)
    out, kl, lse = varlen(x, top_k, return_kl=True, return_lse=True)
    expected, expected_kl, expected_lse, wide = reference(x, top_k)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kl.double(), expected_kl, atol=1e-6, rtol=1e-5)
    dout = torch.randn_like(out)
    torch.autograd.backward([out, kl], [dout, torch.tensor(2.5, device=device)])
    torch.autograd.backward([expected, expected_kl], [dout.double(), torch.tensor(2.5, device=device, dtype=F64)])
    for mine, theirs in zip(x.leaves(), wide.leaves(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=1e-5, rtol=1e-4)

"""Attention written out in plain PyTorch: what the package must compute, by the definition in docs/algorithm.md.

Everything is dense masks and softmax, differentiable, in whatever dtype the inputs have. It shares no code with the
package."""

from __future__ import annotations

import torch
from torch import Tensor


def bounds(cu_seqlens: Tensor) -> tuple[list[int], list[int]]:
    """Begins and ends of fragments from offsets [n + 1] or a [2, n] tensor."""
    if cu_seqlens.dim() == 1:
        return cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()
    return cu_seqlens[0].tolist(), cu_seqlens[1].tolist()


def positions(cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int) -> tuple[Tensor, Tensor]:
    """visible [Tq, Tk], and the number of each key's block within the query's fragment, [Tq, Tk] in tokens: the key's
    position counted from the fragment's first key."""
    device = cu_q.device
    visible = torch.zeros(total_q, total_k, dtype=torch.bool, device=device)
    position = torch.zeros(total_q, total_k, dtype=torch.long, device=device)
    for q0, q1, k0, k1 in zip(*bounds(cu_q), *bounds(cu_k), strict=True):
        stands = torch.arange(q1 - q0, device=device) + (k1 - k0) - (q1 - q0)
        keys = torch.arange(k1 - k0, device=device)
        visible[q0:q1, k0:k1] = keys[None, :] <= stands[:, None]
        position[q0:q1, k0:k1] = keys[None, :]
    return visible, position


def selected(block_indices: Tensor, visible: Tensor, position: Tensor, block_size: int) -> Tensor:
    """[Hp, Tq, Tk]: the keys that a row attends to."""
    number = position // block_size
    chosen = (number[None, :, :, None] == block_indices[:, :, None, :].long()).any(-1)
    return chosen & visible[None]


def select(q_proxy: Tensor, k_proxy: Tensor, cu_q: Tensor, cu_k: Tensor, top_k: int, block_size: int) -> Tensor:
    """The support [Hp, Tq, Tk] of the local block and the top_k - 1 best others. Inputs without ties."""
    visible, position = positions(cu_q, cu_k, len(q_proxy), len(k_proxy))
    scores = proxy_scores(q_proxy, k_proxy, q_proxy.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
    number = position // block_size
    blocks = int(number.max()) + 1
    best = torch.stack([scores.masked_fill(number != b, float("-inf")).amax(-1) for b in range(blocks)], -1)
    local = torch.where(visible, number, -1).amax(-1)
    best.scatter_(-1, local.clamp(min=0)[None, :, None].expand(len(best), -1, 1), float("inf"))
    value, index = best.topk(min(top_k, blocks), dim=-1)
    return selected(index.masked_fill(value == float("-inf"), -1), visible, position, block_size)


def proxy_scores(q_proxy: Tensor, k_proxy: Tensor, scale: float) -> Tensor:
    group = q_proxy.shape[1] // k_proxy.shape[1]
    return torch.einsum("thd,jhd->htj", q_proxy, k_proxy.repeat_interleave(group, 1)) * scale


def softmax(scores: Tensor, support: Tensor) -> Tensor:
    """0 in rows that see nothing."""
    scores = scores.masked_fill(~support, float("-inf"))
    empty = ~support.any(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty | ~support, 0.0)


def attention(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    support: Tensor,
    scale: float | None = None,
    proxy_scale: float | None = None,
    count: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [Tq, Hq, D], kl [], lse [Hq, Tq]) over support [Hp, Tq, Tk]."""
    heads, proxy_heads = q.shape[1], q_proxy.shape[1]
    group, taught = heads // k.shape[1], heads // proxy_heads
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    proxy_scale = q_proxy.shape[-1] ** -0.5 if proxy_scale is None else proxy_scale
    wide = support.repeat_interleave(taught, 0)
    scores = torch.einsum("thd,jhd->htj", q, k.repeat_interleave(group, 1)) * scale
    a = softmax(scores, wide)
    out = torch.einsum("htj,jhd->thd", a, v.repeat_interleave(group, 1))
    lse = torch.logsumexp(scores.masked_fill(~wide, float("-inf")), -1)
    teacher = a.detach().unflatten(0, (proxy_heads, taught)).mean(1)
    student = proxy_scores(q_proxy, k_proxy, proxy_scale).masked_fill(~support, float("-inf"))
    student = student.masked_fill(~support.any(-1, keepdim=True), 0.0)
    log_student = torch.log_softmax(student, -1).masked_fill(~support, 0.0)
    terms = torch.where(
        teacher > 0,
        teacher * (teacher.clamp(min=1e-300 if teacher.dtype == torch.float64 else 1e-38).log() - log_student),
        0.0,
    )
    return out, terms.sum() / (count or len(q) * proxy_heads), lse

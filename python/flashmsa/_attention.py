"""Attention with its gradients, for eager PyTorch: one autograd node for selection, attention and proxy loss.

The operators of ops.py do the same for torch.compile and everything else that looks into a call. This node exists
because of what a call costs the host: it enqueues in one Python function what would be five operator calls.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _kernels
from ._kernels import Wanted
from ._plan import Options, packable


class AttentionFunction(torch.autograd.Function):
    """(q_proxy, k_proxy, q, k, v) -> (out, kl, lse); the proxies get gradients from kl alone, the rest from out."""

    @staticmethod
    def forward(
        ctx: Any,
        q_proxy: torch.Tensor,
        k_proxy: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_indices: torch.Tensor | None,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        options: Options,
        kl_value: bool,
        kl_metric: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_proxy, k_proxy, q, k, v = [packable(x) for x in (q_proxy, k_proxy, q, k, v)]
        plan, result = _kernels.attention(
            q_proxy, k_proxy, q, k, v, block_indices, None, cu_seqlens_q, cu_seqlens_k, options, kl_value
        )
        kl = result.kl
        if kl is None:
            kl = torch.zeros((), dtype=plan.real, device=q.device)
        elif kl_metric is not None:
            kl_metric.copy_(kl)
        ctx.save_for_backward(
            q_proxy, k_proxy, q, k, v, result.out, result.lse, result.schedule, cu_seqlens_q, cu_seqlens_k
        )
        ctx.plan = plan
        ctx.kl_metric = None if kl_value else kl_metric
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(result.lse)
        return result.out, kl, result.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, grad_kl: torch.Tensor | None, _grad_lse: None
    ) -> tuple[torch.Tensor | None, ...]:
        q_proxy, k_proxy, q, k, v, out, lse, schedule, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = Wanted(needs[2], needs[3], needs[4], needs[0], needs[1])
        with_proxy = (grad_kl is not None and (wanted.q_proxy or wanted.k_proxy)) or ctx.kl_metric is not None
        if dout is None and not with_proxy:
            return (None,) * 11
        g = _kernels.gradients(
            ctx.plan,
            q_proxy,
            k_proxy,
            q,
            k,
            v,
            out,
            lse,
            schedule,
            cu_seqlens_q,
            cu_seqlens_k,
            None if dout is None else _kernels.readable_gradient(dout, q),
            grad_kl,
            wanted if grad_kl is not None else wanted._replace(q_proxy=False, k_proxy=False),
            with_proxy,
        )
        if ctx.kl_metric is not None:
            ctx.kl_metric.copy_(g.kl)
        return g.q_proxy, g.k_proxy, g.q, g.k, g.v, None, None, None, None, None, None

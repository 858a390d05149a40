"""Attention with its gradients, for eager PyTorch: one autograd node for selection, attention and proxy loss.

The operators of ops.py do the same for torch.compile and everything else that looks into a call. This node exists
because of what a call costs the host: it enqueues in one Python function what would be five operator calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import _kernels
from ._kernels import Wanted
from ._plan import Options, packable


class Call(NamedTuple):
    """What a call takes besides the five differentiable tensors."""

    block_indices: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    options: Options
    returns_kl: bool
    returns_lse: bool
    kl_value: bool
    kl_metric: torch.Tensor | None


class _NoSecondGradients(torch.autograd.Function):
    """Passes gradients on, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError("flashmsa's gradients have no gradients: attention can be differentiated only once")


def _refuse_second_gradients(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """The same gradients, as ones whose own gradients are an error: these depend on q, k, v and the proxies in ways
    that nobody recorded. PyTorch's once_differentiable lets them pass for constants wherever the incoming gradient is
    one."""
    for x in gradients:
        if x is not None:
            x.requires_grad_()
    results: tuple[torch.Tensor | None, ...] = _NoSecondGradients.apply(*gradients)
    return results


class AttentionFunction(torch.autograd.Function):
    """(q_proxy, k_proxy, q, k, v) -> (out, and kl and lse where the call returns them).

    The proxies get gradients from kl alone, the rest from out. Every tensor that a node returns or saves costs the host
    a microsecond or two, hence none that nobody asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_proxy: torch.Tensor,
        k_proxy: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
    ) -> tuple[torch.Tensor, ...]:
        block_indices, cu_seqlens_q, cu_seqlens_k, options, returns_kl, returns_lse, kl_value, kl_metric = call
        if q.dim() == 4:
            q_proxy, k_proxy, q, k, v = [packable(x) for x in (q_proxy, k_proxy, q, k, v)]
        plan, result = _kernels.attention(
            q_proxy, k_proxy, q, k, v, block_indices, None, cu_seqlens_q, cu_seqlens_k, options, kl_value
        )
        if result.kl is not None and kl_metric is not None:
            kl_metric.copy_(result.kl)
        ctx.plan = plan
        ctx.kl_metric = None if kl_value else kl_metric
        ctx.returns_kl = returns_kl
        trains_proxies = returns_kl and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        proxies = (q_proxy, k_proxy) if trains_proxies or ctx.kl_metric is not None else (None, None)
        ctx.save_for_backward(*proxies, q, k, v, result.out, result.lse, result.schedule, cu_seqlens_q, cu_seqlens_k)
        ctx.set_materialize_grads(False)
        results: tuple[torch.Tensor, ...] = (result.out,)
        if returns_kl:
            kl = result.kl if result.kl is not None else torch.zeros((), dtype=plan.real, device=q.device)
            results = (*results, kl)
        if returns_lse:
            ctx.mark_non_differentiable(result.lse)
            results = (*results, result.lse)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_kl = grads[1] if ctx.returns_kl else None
        if torch.is_grad_enabled():
            with torch.no_grad():
                gradients = _backward(ctx, grads[0], grad_kl)
            return _refuse_second_gradients(gradients)
        return _backward(ctx, grads[0], grad_kl)


def _backward(ctx: Any, dout: torch.Tensor | None, grad_kl: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q_proxy, k_proxy, q, k, v, out, lse, schedule, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    wants_q_proxy, wants_k_proxy, wants_q, wants_k, wants_v, _ = ctx.needs_input_grad
    if grad_kl is None:
        wants_q_proxy = wants_k_proxy = False
    with_proxy = wants_q_proxy or wants_k_proxy or ctx.kl_metric is not None
    if not (wants_q or wants_k or wants_v):
        dout = None
    if dout is None and not with_proxy:
        return None, None, None, None, None, None
    wanted = Wanted(wants_q, wants_k, wants_v, wants_q_proxy, wants_k_proxy)
    if dout is not None:
        dout = _kernels.readable_gradient(dout, q)
    dq, dk, dv, dq_proxy, dk_proxy, kl = _kernels.gradients(
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
        dout,
        grad_kl,
        wanted,
        with_proxy,
        ctx.kl_metric is not None,
    )
    if ctx.kl_metric is not None:
        ctx.kl_metric.copy_(kl)
    return dq_proxy, dk_proxy, dq, dk, dv, None

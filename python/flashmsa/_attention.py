"""Attention with its gradients, for eager PyTorch: one autograd node for selection, attention and proxy loss.

The operators of ops.py do the same for torch.compile and everything else that looks into a call. This node exists
because of what a call costs the host: it enqueues in one Python function what would be five operator calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import _kernels
from ._plan import KL, Options, packable


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


_OUT = 5  # where AttentionFunction saves out

NO_FORWARD_MODE = "flashmsa has no forward-mode derivatives (jvp, jacfwd, hessian); use grad, vjp or jacrev"


class _OnlyOnce(torch.autograd.Function):
    """The first `count` tensors as they are, but as functions of all of them whose derivative is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([x.view_as(x) for x in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Any:
        raise RuntimeError("flashmsa's gradients have no gradients: attention can be differentiated only once")


def only_once(
    gradients: tuple[torch.Tensor | None, ...], *functions_of: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The same gradients, as ones whose own gradients are an error: they depend on what nobody recorded. PyTorch's
    once_differentiable lets them pass for constants wherever the incoming gradient is one."""
    given = [x for x in gradients if x is not None]
    passed = iter(_OnlyOnce.apply(len(given), *given, *[x for x in functions_of if x is not None]))
    return tuple([None if x is None else next(passed) for x in gradients])


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
        # The library reads memory, which holds the other sign where a tensor is a lazy negation.
        if q.is_neg() or k.is_neg() or v.is_neg() or q_proxy.is_neg() or k_proxy.is_neg():
            q_proxy, k_proxy, q, k, v = [x.resolve_neg() for x in (q_proxy, k_proxy, q, k, v)]
        if q.dim() == 4:
            q_proxy, k_proxy, q, k, v = [packable(x) for x in (q_proxy, k_proxy, q, k, v)]
        result = _kernels.attention(
            q_proxy, k_proxy, q, k, v, block_indices, cu_seqlens_q, cu_seqlens_k, options, kl_value
        )
        plan, out, kept, kl = result
        if kl is not None and kl_metric is not None:
            kl_metric.copy_(kl)
        ctx.plan = plan
        ctx.kl_metric = None if kl_value else kl_metric
        ctx.returns_kl = returns_kl
        needs = ctx.needs_input_grad
        keeps_proxies = (returns_kl and (needs[0] or needs[1])) or ctx.kl_metric is not None
        proxies = (q_proxy, k_proxy) if keeps_proxies else (None, None)
        key_offsets = () if cu_seqlens_k is cu_seqlens_q else (cu_seqlens_k,)
        ctx.save_for_backward(*proxies, q, k, v, out, kept, cu_seqlens_q, *key_offsets)
        ctx.set_materialize_grads(False)
        results: tuple[torch.Tensor, ...] = (out,)
        if returns_kl:
            results = (out, kl if kl is not None else plan.empty(KL).zero_())
        if returns_lse:
            lse = result.lse()
            ctx.mark_non_differentiable(lse)
            results = (*results, lse)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_kl = grads[1] if ctx.returns_kl else None
        if torch.is_grad_enabled():
            with torch.no_grad():
                gradients = _backward(ctx, grads[0], grad_kl)
            # The saved inputs may be copies that know nothing of what they were made from; out, which this node made,
            # leads to all of them.
            return only_once(gradients, ctx.saved_tensors[_OUT], *grads)
        return _backward(ctx, grads[0], grad_kl)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(NO_FORWARD_MODE)


def _backward(ctx: Any, dout: torch.Tensor | None, grad_kl: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q_proxy, k_proxy, q, k, v, out, kept, cu_seqlens_q, *key_offsets = ctx.saved_tensors
    if q.dim() == 4:
        # Hooks that move saved tensors elsewhere and back may return them with other strides.
        q_proxy, k_proxy, q, k, v = [None if x is None else packable(x) for x in (q_proxy, k_proxy, q, k, v)]
    wanted, kl_metric = ctx.needs_input_grad, ctx.kl_metric
    if grad_kl is None:
        wanted = (False, False, *wanted[2:])
    elif grad_kl.is_neg():
        grad_kl = grad_kl.resolve_neg()
    with_proxy = wanted[0] or wanted[1] or kl_metric is not None
    if dout is not None:
        dout = _kernels.readable_gradient(dout, q) if wanted[2] or wanted[3] or wanted[4] else None
    if dout is None and not with_proxy:
        return None, None, None, None, None, None
    dq_proxy, dk_proxy, dq, dk, dv, kl = _kernels.gradients(
        ctx.plan,
        q_proxy,
        k_proxy,
        q,
        k,
        v,
        out,
        None,
        kept,
        cu_seqlens_q,
        key_offsets[0] if key_offsets else cu_seqlens_q,
        dout,
        grad_kl,
        wanted,
        with_proxy,
        kl_metric is not None,
    )
    if kl_metric is not None:
        kl_metric.copy_(kl)
    return dq_proxy, dk_proxy, dq, dk, dv, None

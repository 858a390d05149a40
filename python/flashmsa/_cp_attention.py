"""The autograd node of context-parallel attention: one rank's rows over keys that have arrived."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops
from ._attention import only_once
from ._cp_exchange import Route, agree, arrive, depart, told


class Call(NamedTuple):
    """What the autograd node of the attention knows besides tensors: plain values."""

    proxy_heads: int
    top_k: int
    block_size: int
    softmax_scale: float
    proxy_scale: float
    longest: int
    kl_count: int
    deterministic: bool
    kl_value: bool
    fp32_gradients: bool
    keep_keys: bool
    words: str  # group whose ranks tell each other of errors; "" for none
    route: Route | None


class Attention(torch.autograd.Function):
    """(q_proxy, q and the carriers of the keys; keys; ...) -> (out, kl, lse); the carriers take the keys' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        q_proxy: Tensor | None,
        k_proxy_carrier: Tensor | None,
        q: Tensor,
        k_carrier: Tensor,
        v_carrier: Tensor,
        k_proxy: Tensor | None,
        k: Tensor,
        v: Tensor,
        own_k_proxy: Tensor | None,
        own_k: Tensor,
        own_v: Tensor,
        schedule: Tensor | None,
        q_bounds: Tensor,
        k_bounds: Tensor,
        gather_index: Tensor,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = call
        if q_proxy is not None and k_proxy is not None:
            out, kl, lse = ops.attention(
                q_proxy, k_proxy, q, k, v, schedule, q_bounds, k_bounds, c.top_k, c.block_size, c.softmax_scale,
                c.proxy_scale, c.longest, c.kl_count, c.deterministic, c.kl_value,
            )  # fmt: skip
        else:
            out, lse = ops.forward(
                q, k, v, None, q_bounds, k_bounds, c.proxy_heads, 0, c.block_size, c.softmax_scale, c.longest,
                c.deterministic,
            )  # fmt: skip
            kl = lse.new_zeros(())
        keys = (k_proxy, k, v) if c.keep_keys else (own_k_proxy, own_k, own_v)
        carriers = (k_proxy_carrier, k_carrier, v_carrier)
        ctx.save_for_backward(q_proxy, q, *keys, out, lse, schedule, q_bounds, k_bounds, gather_index, *carriers)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        return out, kl, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, grad_kl: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        words = ctx.call.words
        if words and not ctx.call.keep_keys and not torch.compiler.is_compiling():
            agree(words, 0)
        *saved, k_proxy_carrier, k_carrier, v_carrier = ctx.saved_tensors
        grads = told(words, lambda: _gradients(ctx, saved, dout, grad_kl), leave_together=True)
        if not torch.compiler.is_compiling():  # compiled code refuses second derivatives itself
            q_proxy, q = saved[:2]
            grads = only_once(grads, q_proxy, q, k_proxy_carrier, k_carrier, v_carrier, dout, grad_kl)
        return (*grads, *([None] * 11))


def _gradients(ctx: Any, saved: list[Any], dout: Tensor | None, grad_kl: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of q_proxy, k_proxy, q, k and v; those of keys are of this rank's rows alone so far."""
    q_proxy, q, k_proxy, k, v, out, lse, schedule, q_bounds, k_bounds, gather_index = saved
    c: Call = ctx.call
    if c.route is not None and not c.keep_keys:
        pending = [None if x is None else depart(x, c.route) for x in (k_proxy, k, v)]
        k_proxy, k, v = (
            None if p is None else arrive(p, x, gather_index, c.route)
            for p, x in zip(pending, (k_proxy, k, v), strict=True)
        )
    bounds = (q_bounds, k_bounds)
    proxy = grad_kl is not None and any(ctx.needs_input_grad[:2])
    dq_proxy = dk_proxy = dq = dk = dv = None
    if dout is not None and any(ctx.needs_input_grad[2:5]):
        if proxy:
            dq, dk, dv, dq_proxy, dk_proxy, _ = ops.backward_with_proxy(
                dout, grad_kl, q_proxy, k_proxy, q, k, v, out, lse, schedule, *bounds, c.top_k, c.block_size,
                c.softmax_scale, c.proxy_scale, c.longest, c.kl_count, c.deterministic, c.fp32_gradients,
            )  # fmt: skip
        else:
            dq, dk, dv = ops.backward(
                dout, q, k, v, out, lse, schedule, *bounds, c.proxy_heads, c.top_k, c.block_size, c.softmax_scale,
                c.longest, c.deterministic, c.fp32_gradients,
            )  # fmt: skip
    elif proxy:
        _, dq_proxy, dk_proxy = ops.proxy_loss(
            q_proxy, k_proxy, q, k, lse, schedule, grad_kl, *bounds, c.top_k, c.block_size, c.softmax_scale,
            c.proxy_scale, c.longest, c.kl_count, c.deterministic, c.fp32_gradients,
        )  # fmt: skip
    return dq_proxy, dk_proxy, dq, dk, dv

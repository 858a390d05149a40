"""The operations on tensors, without autograd: each allocates its results and one piece of scratch, and enqueues.

Both the PyTorch operators (ops.py) and the eager autograd function (_attention.py) end here. Shapes: Tq, Tk tokens of
queries and keys; Hq, Hkv main heads; Hp, Hpk proxy heads; D, Dp head dimensions; tokens packed [tokens, heads, dim] or
batched [batch, heads, tokens, dim].
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import _library
from ._plan import NO_VIEW, Options, Plan, View, pack_tensors, packable, plan_of, run, view


def _empty_like_packed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An output of x's shape whose tokens lie one after the other, each with all its heads."""
    if x.dim() == 3:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    batch, heads, tokens, dim = x.shape
    row = heads * dim
    return torch.empty_strided((batch, heads, tokens, dim), (tokens * row, dim, row, 1), dtype=dtype, device=x.device)


def _empty_out(q: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, View]:
    """[Tq, Hq, D] for packed queries, [batch, tokens, Hq * D] for batched ones; the same memory either way."""
    heads, dim = plan.geometry.heads, plan.geometry.head_dim
    shape = q.shape if q.dim() == 3 else (q.shape[0], q.shape[2], heads * dim)
    out = torch.empty(shape, dtype=q.dtype, device=q.device)
    return out, (out.data_ptr(), heads * dim, dim)


def _out_view(name: str, x: torch.Tensor, q: torch.Tensor) -> View:
    """The view of an out or dout; that of batched queries is contiguous."""
    if q.dim() == 3:
        return view(name, x)
    heads, dim = q.shape[1], q.shape[3]
    return x.data_ptr(), heads * dim, dim


def _lse_view(lse: torch.Tensor) -> View:
    return lse.data_ptr(), lse.stride(1), lse.stride(0)


def _indices_view(block_indices: torch.Tensor, plan: Plan, options: Options) -> View:
    if not isinstance(block_indices, torch.Tensor) or block_indices.dtype != torch.int32:
        raise TypeError("block_indices must be an int32 tensor")
    g = plan.geometry
    shape = (g.proxy_heads, g.total_q, options.top_k)
    if tuple(block_indices.shape) != shape:
        raise ValueError(
            f"block_indices has shape {tuple(block_indices.shape)}; it must be [proxy heads, tokens, top_k] = {shape}"
        )
    if block_indices.device != g.device:
        raise ValueError(f"block_indices is on {block_indices.device}; it must be on {g.device}, where q is")
    stride = block_indices.stride()
    if stride[2] != 1 and shape[2] != 1:
        raise ValueError(f"block_indices has strides {tuple(stride)}; its last dimension must be contiguous")
    return block_indices.data_ptr(), stride[1], stride[0]


def _check_schedule(schedule: torch.Tensor | None, plan: Plan, options: Options) -> None:
    if options.dense and schedule is not None:
        raise ValueError("schedule was given with top_k 0; dense attention has none")
    if not options.dense and schedule is None:
        raise ValueError(f"schedule is missing; top_k {options.top_k} needs one (top_k 0 means dense attention)")
    if schedule is not None and (schedule.dtype != torch.uint8 or schedule.device != plan.geometry.device):
        raise TypeError(f"schedule is {schedule.dtype} on {schedule.device}; it must be what `schedule` returned")


def _real(name: str, x: torch.Tensor | None, plan: Plan) -> torch.Tensor | None:
    if x is not None and (x.dtype != plan.real or x.numel() != 1 or x.device != plan.geometry.device):
        raise TypeError(
            f"{name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}; it must be one {plan.real} value on "
            f"{plan.geometry.device}"
        )
    return x


def readable_gradient(dout: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """An incoming gradient in a form that the library reads: expanded and transposed ones are copied."""
    if dout.is_contiguous() and dout.data_ptr() % 16 == 0:
        return dout
    size = dout.element_size()
    aligned = dout.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in dout.stride()[:-1])
    return (
        dout if q.dim() == 3 and dout.stride(-1) == 1 and aligned else dout.clone(memory_format=torch.contiguous_format)
    )


class Attention(NamedTuple):
    """What a forward pass leaves: results, and what the backward pass needs besides the inputs."""

    out: torch.Tensor
    lse: torch.Tensor
    kl: torch.Tensor | None
    schedule: torch.Tensor | None


def attention(
    q_proxy: torch.Tensor,
    k_proxy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor | None,
    schedule: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: Options,
    with_kl: bool,
) -> tuple[Plan, Attention]:
    """Selection and schedule unless they are given, forward pass and, if asked, the KL value."""
    plan = plan_of(q_proxy, k_proxy, q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    g = plan.geometry
    operations = []
    indices = NO_VIEW
    if schedule is None and not options.dense:
        if block_indices is None:
            operations.append(_library.SELECT)
            block_indices = torch.empty((g.proxy_heads, g.total_q, options.top_k), dtype=torch.int32, device=g.device)
        operations.append(_library.SCHEDULE)
        indices = _indices_view(block_indices, plan, options)
        schedule = torch.empty(plan.schedule_bytes, dtype=torch.uint8, device=g.device)
    _check_schedule(schedule, plan, options)
    operations.append(_library.FORWARD)
    if with_kl:
        operations.append(_library.PROXY_LOSS)
    out, out_view = _empty_out(q, plan)
    lse = torch.empty((g.heads, g.total_q), dtype=plan.real, device=g.device)
    kl = torch.empty((), dtype=plan.real, device=g.device) if with_kl else None
    config = plan.config(cu_seqlens_q, cu_seqlens_k)
    tensors = pack_tensors(
        q=view("q", q),
        k=view("k", k),
        v=view("v", v),
        q_proxy=view("q_proxy", q_proxy),
        k_proxy=view("k_proxy", k_proxy),
        block_indices=indices,
        schedule=schedule,
        out=out_view,
        lse=_lse_view(lse),
        kl=kl,
    )
    workspace = plan.workspace(*operations)
    for operation in operations:
        run(operation, config, tensors, workspace)
    return plan, Attention(out, lse, kl, schedule)


class Wanted(NamedTuple):
    """Which gradients to compute."""

    q: bool = True
    k: bool = True
    v: bool = True
    q_proxy: bool = True
    k_proxy: bool = True


class Gradients(NamedTuple):
    """Gradients of the shapes of their inputs, None where not wanted, and the KL value where the proxies took part."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    q_proxy: torch.Tensor | None
    k_proxy: torch.Tensor | None
    kl: torch.Tensor | None


def gradients(
    plan: Plan,
    q_proxy: torch.Tensor | None,
    k_proxy: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor,
    schedule: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    dout: torch.Tensor | None,
    grad_kl: torch.Tensor | None,
    wanted: Wanted,
    with_proxy: bool,
) -> Gradients:
    """The backward pass: of the output where dout is given, of the KL loss where `with_proxy` is set, or of both."""
    if dout is None:
        operation = _library.PROXY_LOSS
        wanted = Wanted(False, False, False, wanted.q_proxy, wanted.k_proxy)
    elif with_proxy:
        operation = _library.BACKWARD_WITH_PROXY
    else:
        operation = _library.BACKWARD
        wanted = Wanted(wanted.q, wanted.k, wanted.v, False, False)
    dtype, kv_grad = plan.geometry.dtype, plan.kv_grad
    dq = _empty_like_packed(q, dtype) if wanted.q else None
    dk = _empty_like_packed(k, kv_grad) if wanted.k else None
    dv = _empty_like_packed(k, kv_grad) if wanted.v else None
    dq_proxy = _empty_like_packed(q_proxy, dtype) if wanted.q_proxy and q_proxy is not None else None
    dk_proxy = _empty_like_packed(k_proxy, kv_grad) if wanted.k_proxy and k_proxy is not None else None
    kl = torch.empty((), dtype=plan.real, device=plan.geometry.device) if with_proxy else None
    config = plan.config(cu_seqlens_q, cu_seqlens_k)
    tensors = pack_tensors(
        q=view("q", q),
        k=view("k", k),
        v=NO_VIEW if v is None else view("v", v),
        q_proxy=NO_VIEW if q_proxy is None else view("q_proxy", q_proxy),
        k_proxy=NO_VIEW if k_proxy is None else view("k_proxy", k_proxy),
        schedule=schedule,
        out=NO_VIEW if out is None else _out_view("out", out, q),
        lse=_lse_view(lse),
        dout=NO_VIEW if dout is None else _out_view("dout", dout, q),
        dq=NO_VIEW if dq is None else view("dq", dq),
        dk=NO_VIEW if dk is None else view("dk", dk),
        dv=NO_VIEW if dv is None else view("dv", dv),
        dq_proxy=NO_VIEW if dq_proxy is None else view("dq_proxy", dq_proxy),
        dk_proxy=NO_VIEW if dk_proxy is None else view("dk_proxy", dk_proxy),
        grad_kl=_real("grad_kl", grad_kl, plan),
        kl=kl,
    )
    run(operation, config, tensors, plan.workspace(operation))
    return Gradients(dq, dk, dv, dq_proxy, dk_proxy, kl)


def select(
    q_proxy: torch.Tensor,
    k_proxy: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """Block indices, int32 [Hp, Tq, top_k]."""
    plan = plan_of(q_proxy, k_proxy, None, None, None, cu_seqlens_q, cu_seqlens_k, options)
    g = plan.geometry
    indices = torch.empty((g.proxy_heads, g.total_q, options.top_k), dtype=torch.int32, device=g.device)
    tensors = pack_tensors(
        q_proxy=view("q_proxy", q_proxy),
        k_proxy=view("k_proxy", k_proxy),
        block_indices=_indices_view(indices, plan, options),
    )
    run(_library.SELECT, plan.config(cu_seqlens_q, cu_seqlens_k), tensors, plan.workspace(_library.SELECT))
    return indices


def schedule(
    block_indices: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """The reverse index of a selection, opaque bytes."""
    plan = plan_of(None, None, q, k, None, cu_seqlens_q, cu_seqlens_k, options, block_indices.shape[0])
    result = torch.empty(plan.schedule_bytes, dtype=torch.uint8, device=plan.geometry.device)
    tensors = pack_tensors(block_indices=_indices_view(block_indices, plan, options), schedule=result)
    run(_library.SCHEDULE, plan.config(cu_seqlens_q, cu_seqlens_k), tensors, plan.workspace(_library.SCHEDULE))
    return result


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    schedule: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: Options,
    proxy_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, and lse [Hq, Tq]."""
    plan = plan_of(None, None, q, k, v, cu_seqlens_q, cu_seqlens_k, options, proxy_heads)
    _check_schedule(schedule, plan, options)
    out, out_view = _empty_out(q, plan)
    lse = torch.empty((plan.geometry.heads, plan.geometry.total_q), dtype=plan.real, device=q.device)
    tensors = pack_tensors(
        q=view("q", q), k=view("k", k), v=view("v", v), schedule=schedule, out=out_view, lse=_lse_view(lse)
    )
    run(_library.FORWARD, plan.config(cu_seqlens_q, cu_seqlens_k), tensors, plan.workspace(_library.FORWARD))
    return out, lse

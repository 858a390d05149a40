"""The operations on tensors, without autograd: each allocates its results and one piece of scratch, and enqueues.

Both the PyTorch operators (ops.py) and the eager autograd function (_attention.py) end here. Shapes: Tq, Tk tokens of
queries and keys; Hq, Hkv main heads; Hp, Hpk proxy heads; D, Dp head dimensions; tokens packed [tokens, heads, dim] or
batched [batch, heads, tokens, dim].
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import _library
from ._plan import (
    BLOCK_INDICES,
    DK,
    DK_PROXY,
    DOUT,
    DQ,
    DQ_PROXY,
    DV,
    GRAD_KL,
    KEPT,
    KL,
    LSE,
    OUT,
    SCHEDULE,
    SCHEDULE_BYTES,
    Options,
    Plan,
    plan_of,
    run,
    token_strides,
)


def _set_indices(tensors: array[int], block_indices: torch.Tensor, plan: Plan) -> None:
    """Checks a caller's selection and enters it."""
    if not isinstance(block_indices, torch.Tensor) or block_indices.dtype != torch.int32:
        raise TypeError("block_indices must be an int32 tensor")
    g = plan.geometry
    shape = (g.proxy_heads, g.total_q, plan.top_k)
    if tuple(block_indices.shape) != shape:
        raise ValueError(
            f"block_indices has shape {tuple(block_indices.shape)}; it must be [proxy heads, tokens, top_k] = {shape}"
        )
    if block_indices.device != g.device:
        raise ValueError(f"block_indices is on {block_indices.device}; it must be on {g.device}, where q is")
    stride = block_indices.stride()
    if stride[2] != 1 and shape[2] != 1:
        raise ValueError(f"block_indices has strides {tuple(stride)}; its last dimension must be contiguous")
    tensors[BLOCK_INDICES] = block_indices.data_ptr()
    tensors[BLOCK_INDICES + 1], tensors[BLOCK_INDICES + 2] = stride[1], stride[0]


def _set_output(tensors: array[int], field: int, name: str, x: torch.Tensor) -> None:
    """Enters an out or dout. Packed ones may have any strides; those of a batch are contiguous."""
    tensors[field] = x.data_ptr()
    if not x.is_contiguous():
        tensors[field + 1], tensors[field + 2] = token_strides(name, x)


def _set_lse(tensors: array[int], lse: torch.Tensor) -> None:
    """Enters an lse [heads, tokens] with any strides."""
    tensors[LSE] = lse.data_ptr()
    if not lse.is_contiguous():
        tensors[LSE + 1], tensors[LSE + 2] = lse.stride(1), lse.stride(0)


def _set_kept(tensors: array[int], kept: torch.Tensor, plan: Plan) -> None:
    """Enters the schedule, unless attention is dense, and lse."""
    begin = kept.data_ptr()
    if plan.schedule_bytes:
        tensors[SCHEDULE], tensors[SCHEDULE_BYTES] = begin, plan.schedule_bytes
    tensors[LSE] = begin + plan.lse_offset


def _check_schedule(schedule: torch.Tensor | None, plan: Plan, options: Options) -> None:
    if options.dense and schedule is not None:
        raise ValueError("schedule was given with top_k 0; dense attention has none")
    if not options.dense and schedule is None:
        raise ValueError(f"schedule is missing; top_k {options.top_k} needs one (top_k 0 means dense attention)")
    if schedule is not None and (schedule.dtype != torch.uint8 or schedule.device != plan.geometry.device):
        raise TypeError(f"schedule is {schedule.dtype} on {schedule.device}; it must be what `schedule` returned")
    if schedule is not None and not (schedule.dim() == 1 and schedule.is_contiguous()):
        raise ValueError(
            f"schedule has shape {tuple(schedule.shape)} and strides {schedule.stride()}; it must be what `schedule` "
            "returned"
        )


def check_forward_results(
    plan: Plan,
    options: Options,
    lse: torch.Tensor,
    schedule: torch.Tensor | None,
    out: torch.Tensor | None = None,
    dout: torch.Tensor | None = None,
    grad_kl: torch.Tensor | None = None,
) -> None:
    """Checks what a caller hands to a backward pass of packed tensors. The autograd node holds its own results, and
    has no need of this."""
    g = plan.geometry
    _check_schedule(schedule, plan, options)
    shape = (g.total_q, g.heads, g.head_dim)
    for name, x, dtype, expected in (
        ("out", out, g.dtype, shape),
        ("dout", dout, g.dtype, shape),
        ("lse", lse, plan.real, (g.heads, g.total_q)),
    ):
        if x is None:
            continue
        if x.dtype != dtype:
            raise TypeError(f"{name} is {x.dtype}; it must be {dtype}")
        if x.device != g.device:
            raise ValueError(f"{name} is on {x.device}; it must be on {g.device}, where q is")
        if tuple(x.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {expected}")
    if grad_kl is not None and not (grad_kl.dtype == plan.real and grad_kl.numel() == 1 and grad_kl.device == g.device):
        raise TypeError(
            f"grad_kl is {grad_kl.dtype} of shape {tuple(grad_kl.shape)} on {grad_kl.device}; it must be one "
            f"{plan.real} value on {g.device}"
        )


def readable_gradient(dout: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """An incoming gradient in a form that the library reads: expanded, transposed and lazily negated ones are
    copied."""
    if dout.is_neg():
        dout = dout.resolve_neg()
    if dout.is_contiguous() and dout.data_ptr() % 16 == 0:
        return dout
    size = dout.element_size()
    aligned = dout.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in dout.stride()[:-1])
    return (
        dout if q.dim() == 3 and dout.stride(-1) == 1 and aligned else dout.clone(memory_format=torch.contiguous_format)
    )


class Attention(NamedTuple):
    """What a forward pass leaves: results, and what the backward pass needs besides inputs and out (see KEPT)."""

    plan: Plan
    out: torch.Tensor
    kept: torch.Tensor
    kl: torch.Tensor | None

    def lse(self) -> torch.Tensor:
        """lse [Hq, Tq], a view into `kept`."""
        g = self.plan.geometry
        return self.kept[self.plan.lse_offset :].view(self.plan.real).view(g.heads, g.total_q)


# What a forward pass runs, by the selection that it has to make or is given, and by whether it returns the KL value.
_DENSE = ((_library.FORWARD,), (_library.FORWARD, _library.PROXY_LOSS))
_GIVEN = tuple([(_library.SCHEDULE, *rest) for rest in _DENSE])
_SELECTED = tuple([(_library.SELECT, *rest) for rest in _GIVEN])


def attention(
    q_proxy: torch.Tensor,
    k_proxy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: Options,
    with_kl: bool,
) -> Attention:
    """Selection unless it is given, schedule, forward pass and, if asked, the KL value, in four pieces of memory at
    most: a selection lives in the scratch."""
    plan = plan_of(q_proxy, k_proxy, q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    tensors = plan.tensors(q_proxy, k_proxy, q, k, v)
    if options.top_k == 0:
        if block_indices is not None:
            raise ValueError("block_indices was given with top_k 0; dense attention has no selection")
        operations = _DENSE[with_kl]
    elif block_indices is None:
        operations = _SELECTED[with_kl]
    else:
        operations = _GIVEN[with_kl]
        _set_indices(tensors, block_indices, plan)
    out, kept, workspace = plan.empty(OUT), plan.empty(KEPT), plan.empty(operations)
    tensors[OUT] = out.data_ptr()
    _set_kept(tensors, kept, plan)
    scratch, scratch_bytes = workspace.data_ptr(), workspace.numel()
    if operations[0] == _library.SELECT:
        tensors[BLOCK_INDICES] = scratch
        scratch, scratch_bytes = scratch + plan.indices_bytes, scratch_bytes - plan.indices_bytes
    kl = None
    if with_kl:
        kl = plan.empty(KL)
        tensors[KL] = kl.data_ptr()
    config = plan.config(cu_seqlens_q, cu_seqlens_k)
    for operation in operations:
        run(operation, config, tensors, scratch, scratch_bytes)
    return Attention(plan, out, kept, kl)


def _run_alone(
    operation: int, plan: Plan, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, tensors: array[int]
) -> None:
    workspace = plan.empty((operation,))
    run(operation, plan.config(cu_seqlens_q, cu_seqlens_k), tensors, workspace.data_ptr(), workspace.numel())


class Gradients(NamedTuple):
    """Gradients of the shapes of their inputs, None where not wanted, and the KL value where it was asked for."""

    q_proxy: torch.Tensor | None
    k_proxy: torch.Tensor | None
    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    kl: torch.Tensor | None


_PROXY_GRADIENTS, _MAIN_GRADIENTS = (DQ_PROXY, DK_PROXY), (DQ, DK, DV)


def gradients(
    plan: Plan,
    q_proxy: torch.Tensor | None,
    k_proxy: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    schedule: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    dout: torch.Tensor | None,
    grad_kl: torch.Tensor | None,
    wanted: Sequence[bool],
    with_proxy: bool,
    with_kl: bool,
) -> Gradients:
    """The backward pass: of the output where dout is given, of the KL loss where `with_proxy` is set, or of both; with
    the KL value where `with_kl` is set too. `wanted` says of the proxies, q, k and v, in this order, whose gradients to
    compute. Without lse, `schedule` is what the forward pass kept."""
    tensors = plan.tensors(q_proxy, k_proxy, q, k, v)
    if lse is not None:
        _set_lse(tensors, lse)
        if schedule is not None:
            tensors[SCHEDULE], tensors[SCHEDULE_BYTES] = schedule.data_ptr(), schedule.numel()
    else:
        assert schedule is not None
        _set_kept(tensors, schedule, plan)
    if out is not None:
        _set_output(tensors, OUT, "out", out)
    if grad_kl is not None:
        tensors[GRAD_KL] = grad_kl.data_ptr()

    operation = _library.PROXY_LOSS
    results: list[torch.Tensor | None] = [None] * 5
    if dout is not None:
        operation = _library.BACKWARD_WITH_PROXY if with_proxy else _library.BACKWARD
        _set_output(tensors, DOUT, "dout", dout)
        for i, field in enumerate(_MAIN_GRADIENTS, 2):
            if wanted[i]:
                results[i] = x = plan.empty(field)
                tensors[field] = x.data_ptr()
    if with_proxy:
        for i, field in enumerate(_PROXY_GRADIENTS):
            if wanted[i]:
                results[i] = x = plan.empty(field)
                tensors[field] = x.data_ptr()
    kl = None
    if with_kl:
        kl = plan.empty(KL)
        tensors[KL] = kl.data_ptr()
    _run_alone(operation, plan, cu_seqlens_q, cu_seqlens_k, tensors)
    dq_proxy, dk_proxy, dq, dk, dv = results
    return Gradients(dq_proxy, dk_proxy, dq, dk, dv, kl)


def select(
    q_proxy: torch.Tensor,
    k_proxy: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """Block indices, int32 [Hp, Tq, top_k]."""
    plan = plan_of(q_proxy, k_proxy, None, None, None, cu_seqlens_q, cu_seqlens_k, options)
    indices = plan.empty(BLOCK_INDICES)
    tensors = plan.tensors(q_proxy, k_proxy, None, None, None)
    tensors[BLOCK_INDICES] = indices.data_ptr()
    _run_alone(_library.SELECT, plan, cu_seqlens_q, cu_seqlens_k, tensors)
    return indices


def schedule(
    block_indices: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """The reverse index of a selection, opaque bytes. Those that the library leaves unused are 0, so that the same
    selection gives the same tensor."""
    plan = plan_of(None, None, q, k, None, cu_seqlens_q, cu_seqlens_k, options, block_indices.shape[0])
    result = torch.zeros(plan.schedule_bytes, dtype=torch.uint8, device=plan.geometry.device)
    tensors = plan.tensors(None, None, None, None, None)
    _set_indices(tensors, block_indices, plan)
    tensors[SCHEDULE], tensors[SCHEDULE_BYTES] = result.data_ptr(), result.numel()
    _run_alone(_library.SCHEDULE, plan, cu_seqlens_q, cu_seqlens_k, tensors)
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
    out, lse = plan.empty(OUT), plan.empty(LSE)
    tensors = plan.tensors(None, None, q, k, v)
    tensors[OUT], tensors[LSE] = out.data_ptr(), lse.data_ptr()
    if schedule is not None:
        tensors[SCHEDULE], tensors[SCHEDULE_BYTES] = schedule.data_ptr(), schedule.numel()
    _run_alone(_library.FORWARD, plan, cu_seqlens_q, cu_seqlens_k, tensors)
    return out, lse

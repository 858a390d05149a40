"""The operations as PyTorch operators, torch.ops.flashmsa.*, for CPU and CUDA tensors.

Tensors are packed: Tq query tokens and Tk key tokens of all sequences, [tokens, heads, dim], last dimension contiguous.
cu_seqlens_q and cu_seqlens_k are int32, on the tensors' device: [n + 1] offsets as FlashAttention has them, or [2, n]
begins and ends of n fragments, for chunks that overlap or leave gaps (include/flashmsa.h has the rules). top_k counts
blocks; 0 means dense attention over every visible key, which has no selection and no schedule. Scales of 0 are D^-1/2.
`max_seqlen_k` of 0 is unknown; a true bound saves scratch on CUDA. Nothing here synchronises with the device.

Errors: TypeError for dtypes, ValueError for shapes and values, RuntimeError for devices and CUDA.

A schedule is made once and read by all that follow it. What traces a program cannot know how long it will be, so
`attention` and the gradients also take block_indices in its place, and each then makes a schedule of its own.

`attention` and `forward` have gradients. The others are for frameworks that place each step themselves:

    >>> import torch, flashmsa
    >>> q, k, v = torch.randn(256, 4, 64), torch.randn(256, 2, 64), torch.randn(256, 2, 64)
    >>> q_proxy, k_proxy = torch.randn(256, 2, 64), torch.randn(256, 1, 64)
    >>> cu = torch.tensor([0, 100, 256], dtype=torch.int32)
    >>> indices = flashmsa.ops.select(q_proxy, k_proxy, cu, cu, 2, block_size=32)
    >>> schedule = flashmsa.ops.schedule(indices, q, k, cu, cu, block_size=32)
    >>> out, lse = flashmsa.ops.forward(q, k, v, schedule, cu, cu, 2, 2, block_size=32)
    >>> kl, dq_proxy, dk_proxy = flashmsa.ops.proxy_loss(q_proxy, k_proxy, q, k, lse, schedule, None, cu, cu, 2, 32)
    >>> out.shape, lse.shape, dq_proxy.shape
    (torch.Size([256, 4, 64]), torch.Size([4, 256]), torch.Size([256, 2, 64]))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from . import _kernels, _library
from ._attention import NO_FORWARD_MODE, only_once
from ._plan import Options, plan_of

NAMESPACE = "flashmsa"
F = TypeVar("F", bound=Callable[..., Any])


def _operator(schema: str) -> Callable[[F], F]:
    """Makes a function the operator flashmsa::<its name>."""

    def decorate(function: F) -> F:
        name = f"{NAMESPACE}::{function.__name__}"
        operator = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        functools.update_wrapper(operator, function)
        return cast(F, operator)

    return decorate


def _fake(operator: Callable[..., Any]) -> Callable[[F], F]:
    """Registers what an operator returns, told from shapes alone."""

    def decorate(function: F) -> F:
        torch.library.register_fake(f"{NAMESPACE}::{operator.__name__}", function)
        return function

    return decorate


def _flags(deterministic: bool = False, fp32_kv_grads: bool = False, fp8: bool = False) -> int:
    flags = 0
    if deterministic or torch.are_deterministic_algorithms_enabled():
        flags |= _library.FLAG_DETERMINISTIC
    if fp32_kv_grads:
        flags |= _library.FLAG_FP32_KV_GRADS
    return flags | (_library.FLAG_SELECT_FP8 if fp8 else 0)


def _real(x: Tensor) -> torch.dtype:
    """The type of lse and kl."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_packed(name: str, x: Tensor) -> None:
    """Refuses a batch. The others of a call are compared with this one."""
    if x.dim() != 3:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [tokens, heads, dim]")


def _check_indices(block_indices: Tensor) -> None:
    if block_indices.dim() != 3:
        raise ValueError(
            f"block_indices has shape {tuple(block_indices.shape)}; it must be [proxy heads, tokens, top_k]"
        )


def _schedule_for(
    schedule: Tensor | None,
    block_indices: Tensor | None,
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: Options,
) -> Tensor | None:
    """The schedule that was given, or one made for this call alone."""
    if schedule is not None or block_indices is None:
        return schedule
    _check_indices(block_indices)
    return _kernels.schedule(block_indices, q, k, cu_seqlens_q, cu_seqlens_k, options)


# ---- Selection ----------------------------------------------------------------------------------------------------


@_operator(
    "(Tensor q_proxy, Tensor k_proxy, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt top_k, SymInt block_size=128, "
    "SymInt local_blocks=1, SymInt init_blocks=0, float proxy_scale=0.0, SymInt max_seqlen_k=0, bool fp8=False) "
    "-> Tensor"
)
def select(
    q_proxy: Tensor,
    k_proxy: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    top_k: int,
    block_size: int = 128,
    local_blocks: int = 1,
    init_blocks: int = 0,
    proxy_scale: float = 0.0,
    max_seqlen_k: int = 0,
    fp8: bool = False,
) -> Tensor:
    """Block indices, int32 [Hp, Tq, top_k]: for each proxy head and token the blocks of `block_size` keys with the
    greatest max-pooled proxy scores, among them the `local_blocks` newest and `init_blocks` first; ascending, then -1.
    `fp8` scores in FP8 E4M3 where the card has it."""
    _check_packed("q_proxy", q_proxy)
    options = Options(
        top_k, block_size, local_blocks, init_blocks, 0.0, proxy_scale, max_seqlen_k, 0, _flags(False, False, fp8)
    )
    return _kernels.select(q_proxy, k_proxy, cu_seqlens_q, cu_seqlens_k, options)


@_fake(select)
def _(q_proxy: Tensor, k_proxy: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, top_k: int, *_: Any) -> Tensor:
    return q_proxy.new_empty((q_proxy.shape[1], q_proxy.shape[0], top_k), dtype=torch.int32)


@_operator(
    "(Tensor block_indices, Tensor q, Tensor k, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt block_size=128, "
    "SymInt max_seqlen_k=0) -> Tensor"
)
def schedule(
    block_indices: Tensor,
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_size: int = 128,
    max_seqlen_k: int = 0,
) -> Tensor:
    """The reverse index of a selection, opaque uint8: which tokens chose each key block. Of q and k only the shapes
    are used. block_indices may come from elsewhere: any order, distinct in a row, -1 anywhere."""
    _check_packed("q", q)
    _check_indices(block_indices)
    options = Options(block_indices.shape[2], block_size, max_seqlen_k=max_seqlen_k)
    return _kernels.schedule(block_indices, q, k, cu_seqlens_q, cu_seqlens_k, options)


@_fake(schedule)
def _(block_indices: Tensor, *_: Any) -> Tensor:
    # The library knows the size only from numbers, and a traced length is none.
    size = torch.library.get_ctx().new_dynamic_size()
    return block_indices.new_empty((size,), dtype=torch.uint8)


# ---- Forward ------------------------------------------------------------------------------------------------------


@_operator(
    "(Tensor q, Tensor k, Tensor v, Tensor? schedule, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt proxy_heads, "
    "SymInt top_k, SymInt block_size=128, float softmax_scale=0.0, SymInt max_seqlen_k=0, bool deterministic=False) "
    "-> (Tensor, Tensor)"
)
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    proxy_heads: int,
    top_k: int,
    block_size: int = 128,
    softmax_scale: float = 0.0,
    max_seqlen_k: int = 0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [Tq, Hq, D] and lse [Hq, Tq], the natural logarithm of each row's sum of exponentials. Gradients flow to q,
    k and v from out."""
    _check_packed("q", q)
    options = Options(
        top_k, block_size, softmax_scale=softmax_scale, max_seqlen_k=max_seqlen_k, flags=_flags(deterministic)
    )
    return _kernels.forward(q, k, v, schedule, cu_seqlens_q, cu_seqlens_k, options, proxy_heads)


@_fake(forward)
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=_real(q))


@_operator(
    "(Tensor q_proxy, Tensor k_proxy, Tensor q, Tensor k, Tensor v, Tensor? schedule, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt top_k, SymInt block_size=128, float softmax_scale=0.0, float proxy_scale=0.0, "
    "SymInt max_seqlen_k=0, SymInt kl_count=0, bool deterministic=False, bool kl_value=True, "
    "Tensor? block_indices=None) -> (Tensor, Tensor, Tensor)"
)
def attention(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    top_k: int,
    block_size: int = 128,
    softmax_scale: float = 0.0,
    proxy_scale: float = 0.0,
    max_seqlen_k: int = 0,
    kl_count: int = 0,
    deterministic: bool = False,
    kl_value: bool = True,
    block_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out [Tq, Hq, D], kl [] and lse [Hq, Tq]. Gradients flow to q, k and v from out, and to the proxies from kl.
    Without `kl_value`, kl is 0 and only carries the gradient: that saves a pass over the selected blocks."""
    _check_packed("q", q)
    options = Options(
        top_k, block_size, 1, 0, softmax_scale, proxy_scale, max_seqlen_k, kl_count, _flags(deterministic)
    )
    plan = plan_of(q_proxy, k_proxy, q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    schedule = _schedule_for(schedule, block_indices, q, k, cu_seqlens_q, cu_seqlens_k, options)
    out, lse = _kernels.forward(q, k, v, schedule, cu_seqlens_q, cu_seqlens_k, options, q_proxy.shape[1])
    if not kl_value:
        return out, torch.zeros((), dtype=plan.real, device=q.device), lse
    result = _kernels.gradients(
        plan,
        q_proxy,
        k_proxy,
        q,
        k,
        None,
        None,
        lse,
        schedule,
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        None,
        (False,) * 5,
        True,
        True,
    )
    assert result.kl is not None
    return out, result.kl, lse


@_fake(attention)
def _(q_proxy: Tensor, k_proxy: Tensor, q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    real = _real(q)
    return q.new_empty(q.shape), q.new_empty((), dtype=real), q.new_empty((q.shape[1], q.shape[0]), dtype=real)


# ---- Proxy loss and gradients -------------------------------------------------------------------------------------


@_operator(
    "(Tensor q_proxy, Tensor k_proxy, Tensor q, Tensor k, Tensor lse, Tensor? schedule, Tensor? grad_kl, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt top_k, SymInt block_size=128, float softmax_scale=0.0, "
    "float proxy_scale=0.0, SymInt max_seqlen_k=0, SymInt kl_count=0, bool deterministic=False, "
    "bool fp32_kv_grads=False, bool gradients=True, Tensor? block_indices=None) -> (Tensor, Tensor, Tensor)"
)
def proxy_loss(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    schedule: Tensor | None,
    grad_kl: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    top_k: int,
    block_size: int = 128,
    softmax_scale: float = 0.0,
    proxy_scale: float = 0.0,
    max_seqlen_k: int = 0,
    kl_count: int = 0,
    deterministic: bool = False,
    fp32_kv_grads: bool = False,
    gradients: bool = True,
    block_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """kl [], dq_proxy [Tq, Hp, Dp] and dk_proxy [Tk, Hpk, Dp]: value and gradients at once, so that the proxies need
    not be kept for a backward pass. grad_kl is dL/dKL, one value on the device; None is 1. Without `gradients` the two
    are empty and their work is skipped. `fp32_kv_grads` returns dk_proxy in fp32, for sums over ranks."""
    flags = _flags(deterministic, fp32_kv_grads)
    options = Options(top_k, block_size, 1, 0, softmax_scale, proxy_scale, max_seqlen_k, kl_count, flags)
    _check_packed("q", q)
    plan = plan_of(q_proxy, k_proxy, q, k, None, cu_seqlens_q, cu_seqlens_k, options)
    schedule = _schedule_for(schedule, block_indices, q, k, cu_seqlens_q, cu_seqlens_k, options)
    _kernels.check_forward_results(plan, options, lse, schedule, grad_kl=grad_kl)
    result = _kernels.gradients(
        plan,
        q_proxy,
        k_proxy,
        q,
        k,
        None,
        None,
        lse,
        schedule,
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        grad_kl,
        (gradients, gradients, False, False, False),
        True,
        True,
    )
    dq_proxy = result.q_proxy if result.q_proxy is not None else q_proxy.new_empty(0)
    dk_proxy = result.k_proxy if result.k_proxy is not None else k_proxy.new_empty(0, dtype=plan.kv_grad)
    assert result.kl is not None
    return result.kl, dq_proxy, dk_proxy


@_fake(proxy_loss)
def _(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    schedule: Tensor | None,
    grad_kl: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    top_k: int,
    block_size: int = 128,
    softmax_scale: float = 0.0,
    proxy_scale: float = 0.0,
    max_seqlen_k: int = 0,
    kl_count: int = 0,
    deterministic: bool = False,
    fp32_kv_grads: bool = False,
    gradients: bool = True,
    block_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_grad = torch.float32 if fp32_kv_grads else k_proxy.dtype
    kl = q.new_empty((), dtype=_real(q))
    if not gradients:
        return kl, q_proxy.new_empty(0), k_proxy.new_empty(0, dtype=kv_grad)
    return kl, q_proxy.new_empty(q_proxy.shape), k_proxy.new_empty(k_proxy.shape, dtype=kv_grad)


@_operator(
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? schedule, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt proxy_heads, SymInt top_k, SymInt block_size=128, float softmax_scale=0.0, "
    "SymInt max_seqlen_k=0, bool deterministic=False, bool fp32_kv_grads=False, Tensor? block_indices=None) "
    "-> (Tensor, Tensor, Tensor)"
)
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    schedule: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    proxy_heads: int,
    top_k: int,
    block_size: int = 128,
    softmax_scale: float = 0.0,
    max_seqlen_k: int = 0,
    deterministic: bool = False,
    fp32_kv_grads: bool = False,
    block_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [Tq, Hq, D], dk and dv [Tk, Hkv, D]; the latter two in fp32 with `fp32_kv_grads`."""
    flags = _flags(deterministic, fp32_kv_grads)
    options = Options(top_k, block_size, softmax_scale=softmax_scale, max_seqlen_k=max_seqlen_k, flags=flags)
    _check_packed("q", q)
    plan = plan_of(None, None, q, k, v, cu_seqlens_q, cu_seqlens_k, options, proxy_heads)
    schedule = _schedule_for(schedule, block_indices, q, k, cu_seqlens_q, cu_seqlens_k, options)
    _kernels.check_forward_results(plan, options, lse, schedule, out, dout)
    dout = _kernels.readable_gradient(dout, q)
    result = _kernels.gradients(
        plan, None, None, q, k, v, out, lse, schedule, cu_seqlens_q, cu_seqlens_k, dout, None, (True,) * 5, False, False
    )
    return cast(tuple[Tensor, Tensor, Tensor], (result.q, result.k, result.v))


@_fake(backward)
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    schedule: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    proxy_heads: int,
    top_k: int,
    block_size: int = 128,
    softmax_scale: float = 0.0,
    max_seqlen_k: int = 0,
    deterministic: bool = False,
    fp32_kv_grads: bool = False,
    block_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float32 if fp32_kv_grads else k.dtype
    return q.new_empty(q.shape), k.new_empty(k.shape, dtype=dtype), v.new_empty(v.shape, dtype=dtype)


@_operator(
    "(Tensor dout, Tensor? grad_kl, Tensor q_proxy, Tensor k_proxy, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor lse, Tensor? schedule, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt top_k, SymInt block_size=128, "
    "float softmax_scale=0.0, float proxy_scale=0.0, SymInt max_seqlen_k=0, SymInt kl_count=0, "
    "bool deterministic=False, bool fp32_kv_grads=False, Tensor? block_indices=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def backward_with_proxy(
    dout: Tensor,
    grad_kl: Tensor | None,
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    schedule: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    top_k: int,
    block_size: int = 128,
    softmax_scale: float = 0.0,
    proxy_scale: float = 0.0,
    max_seqlen_k: int = 0,
    kl_count: int = 0,
    deterministic: bool = False,
    fp32_kv_grads: bool = False,
    block_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dq_proxy, dk_proxy and kl: `backward` and `proxy_loss` at once. The gradients of keys and values are
    fp32 with `fp32_kv_grads`."""
    flags = _flags(deterministic, fp32_kv_grads)
    options = Options(top_k, block_size, 1, 0, softmax_scale, proxy_scale, max_seqlen_k, kl_count, flags)
    _check_packed("q", q)
    plan = plan_of(q_proxy, k_proxy, q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    schedule = _schedule_for(schedule, block_indices, q, k, cu_seqlens_q, cu_seqlens_k, options)
    _kernels.check_forward_results(plan, options, lse, schedule, out, dout, grad_kl)
    dout = _kernels.readable_gradient(dout, q)
    result = _kernels.gradients(
        plan,
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
        (True,) * 5,
        True,
        True,
    )
    results = (result.q, result.k, result.v, result.q_proxy, result.k_proxy, result.kl)
    return cast(tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], results)


@_fake(backward_with_proxy)
def _(
    dout: Tensor,
    grad_kl: Tensor | None,
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    schedule: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    top_k: int,
    block_size: int = 128,
    softmax_scale: float = 0.0,
    proxy_scale: float = 0.0,
    max_seqlen_k: int = 0,
    kl_count: int = 0,
    deterministic: bool = False,
    fp32_kv_grads: bool = False,
    block_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.float32 if fp32_kv_grads else k.dtype
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape, dtype=dtype),
        v.new_empty(v.shape, dtype=dtype),
        q_proxy.new_empty(q_proxy.shape),
        k_proxy.new_empty(k_proxy.shape, dtype=dtype),
        q.new_empty((), dtype=_real(q)),
    )


# ---- Autograd -----------------------------------------------------------------------------------------------------


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, schedule, cu_seqlens_q, cu_seqlens_k, *choices = inputs
    ctx.save_for_backward(q, k, v, *output, schedule, cu_seqlens_q, cu_seqlens_k)
    ctx.choices = choices
    ctx.mark_non_differentiable(output[1])


def _backward_of_forward(ctx: Any, dout: Tensor, _grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, schedule, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    grads = backward(dout, q, k, v, out, lse, schedule, cu_seqlens_q, cu_seqlens_k, *ctx.choices)
    return (*grads, None, None, None, *([None] * len(ctx.choices)))


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q_proxy, k_proxy, q, k, v, schedule, cu_seqlens_q, cu_seqlens_k, *choices, block_indices = inputs
    out, _, lse = output
    ctx.save_for_backward(q_proxy, k_proxy, q, k, v, out, lse, schedule, cu_seqlens_q, cu_seqlens_k, block_indices)
    ctx.choices = choices
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)


def _backward_of_attention(
    ctx: Any, dout: Tensor | None, grad_kl: Tensor | None, _grad_lse: Tensor | None
) -> tuple[Any, ...]:
    q_proxy, k_proxy, q, k, v, out, lse, schedule, cu_seqlens_q, cu_seqlens_k, block_indices = ctx.saved_tensors
    cu = (cu_seqlens_q, cu_seqlens_k)
    top_k, block_size, softmax_scale, proxy_scale, max_seqlen_k, kl_count, deterministic, _ = ctx.choices
    wants_main = any(ctx.needs_input_grad[2:5])
    proxy = grad_kl is not None and any(ctx.needs_input_grad[:2])
    shared = (top_k, block_size, softmax_scale, proxy_scale, max_seqlen_k, kl_count, deterministic)
    dq_proxy = dk_proxy = dq = dk = dv = None
    if dout is not None and wants_main and proxy:
        dq, dk, dv, dq_proxy, dk_proxy, _ = backward_with_proxy(
            dout, grad_kl, q_proxy, k_proxy, q, k, v, out, lse, schedule, *cu, *shared, False, block_indices
        )
    elif dout is not None and wants_main:
        main = (q_proxy.shape[1], top_k, block_size, softmax_scale, max_seqlen_k, deterministic)
        dq, dk, dv = backward(dout, q, k, v, out, lse, schedule, *cu, *main, False, block_indices)
    elif proxy:
        _, dq_proxy, dk_proxy = proxy_loss(
            q_proxy, k_proxy, q, k, lse, schedule, grad_kl, *cu, *shared, False, True, block_indices
        )
    return (dq_proxy, dk_proxy, dq, dk, dv, None, None, None, *([None] * len(ctx.choices)), None)


torch.library.register_autograd(f"{NAMESPACE}::forward", _backward_of_forward, setup_context=_setup_forward)
torch.library.register_autograd(f"{NAMESPACE}::attention", _backward_of_attention, setup_context=_setup_attention)


# ---- torch.func ---------------------------------------------------------------------------------------------------


class TransformedAttention(torch.autograd.Function):
    """`attention` for torch.func, which asks an operator's autograd function for a setup_context that it has not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return attention(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _setup_attention(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            results = _backward_of_attention(ctx, *grads)
        return only_once(results, *ctx.saved_tensors[:5], *grads)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(NO_FORWARD_MODE)


# ---- Autocast -----------------------------------------------------------------------------------------------------


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that autocast wants on a kind of device; None while it is off, and where it does not exist."""
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast_to(dtype: torch.dtype | None, *tensors: Any) -> list[Any]:
    """Casts the fp32, fp16 and bf16 tensors among the arguments; fp64 is somebody's gradient check."""
    if dtype is None:
        return list(tensors)
    low = (torch.float32, torch.float16, torch.bfloat16)
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype in low else x for x in tensors]


_library_fragment = torch.library.Library(NAMESPACE, "FRAGMENT")


def _register_autocast(operator: Callable[..., Any], cast_arguments: int) -> None:
    """Casts the leading arguments of an operator. lse, grad_kl and what else follows keep their types."""

    def rule(device_type: str) -> Callable[..., Any]:
        def cast_and_call(*arguments: Any) -> Any:
            dtype = autocast_dtype(device_type)
            with torch.autocast(device_type, enabled=False):
                return operator(*cast_to(dtype, *arguments[:cast_arguments]), *arguments[cast_arguments:])

        return cast_and_call

    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _library_fragment.impl(operator.__name__, rule(device_type), key)


for _op, _count in ((select, 2), (schedule, 3), (forward, 3), (attention, 5), (proxy_loss, 4)):
    _register_autocast(_op, _count)

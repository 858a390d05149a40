"""Attention functions: Flash-MSA's batched ones and a packed one in FlashAttention's style."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _library, ops
from ._attention import AttentionFunction, Call
from ._plan import Options, check_batch, current_stream, plan_of


def flash_msa_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor,
    k_proxy: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    top_k_blocks: int,
    softmax_scale: float | None = None,
    proxy_scale: float | None = None,
    deterministic: bool = False,
    *,
    block_size: int = 128,
    local_blocks: int = 1,
    init_blocks: int = 0,
    block_indices: Tensor | None = None,
    select_fp8: bool = False,
    kl_count: int = 0,
    kl_value: bool = True,
    kl_metric: Tensor | None = None,
    return_kl: bool = False,
    return_lse: bool = False,
) -> Any:
    """Causal MiniMax Sparse Attention over packed sequences.

    Query i of a sequence stands at position (keys - queries) + i, as in FlashAttention's varlen functions.

    Args:
        q: [Tq, Hq, D], bf16 or fp16 (fp32 and, on the CPU, fp64 too); the last dimension contiguous.
        k, v: [Tk, Hkv, D]; Hkv divides Hq.
        q_proxy: [Tq, Hp, Dp]; Hp divides Hq, and one of Hp and Hkv divides the other.
        k_proxy: [Tk, Hpk, Dp]; Hpk divides Hp.
        cu_seqlens_q, cu_seqlens_k: int32 offsets [n + 1] in tokens, on the tensors' device; or [2, n] begins and ends.
            Tokens outside of them get out 0 and count in the divisor of the KL loss.
        max_seqlen_q, max_seqlen_k: no sequence is longer, in tokens; 0 = unknown. Only max_seqlen_k is used: it saves
            scratch on CUDA.
        top_k_blocks: blocks of `block_size` keys that each token keeps for each proxy head; 0 = dense attention over
            every visible key, which warms the proxies up.
        softmax_scale, proxy_scale: factors of the main and the proxy scores; None = D^-1/2 and Dp^-1/2.
        deterministic: bit-identical gradients on every run; also set by torch.use_deterministic_algorithms.
        block_size: keys in a block, in tokens: 64 or 128 on CUDA, at least 16 on the CPU.
        local_blocks, init_blocks: how many of the newest and of the first blocks are always kept.
        block_indices: int32 [Hp, Tq, top_k_blocks], a selection to use instead of one by score, -1 for no block.
        select_fp8: score blocks in FP8 where the card has it; near-ties may be decided differently.
        kl_count: divisor of the KL loss; 0 = Tq * Hp. Give the global count when tokens are spread over ranks.
        kl_value: False: the KL returned is 0 and only carries the gradient, which saves a pass over the selected
            blocks.
        kl_metric: a 0-dim fp32 tensor that receives the KL value: in the forward pass, or without `kl_value` in the
            backward pass, where it costs almost nothing.
        return_kl: also return the KL loss, a 0-dim tensor, fp64 for fp64 inputs, else fp32. Its gradient reaches
            q_proxy and k_proxy alone.
        return_lse: also return lse [Hq, Tq] in the type of the KL loss, without gradient.

    Returns:
        out [Tq, Hq, D], or a tuple of out, then kl and lse where asked for. out has gradients in q, k and v.

    Raises:
        TypeError: a dtype does not fit. ValueError: a shape or value does not. RuntimeError: the device cannot.

    Example:
        >>> import torch, flashmsa
        >>> q, k, v = (torch.randn(96, heads, 64, requires_grad=True) for heads in (4, 2, 2))
        >>> q_proxy, k_proxy = (torch.randn(96, heads, 64, requires_grad=True) for heads in (2, 1))
        >>> cu = torch.tensor([0, 40, 96], dtype=torch.int32)
        >>> out, kl = flashmsa.flash_msa_varlen_func(
        ...     q, k, v, q_proxy, k_proxy, cu, cu, 56, 56, top_k_blocks=2, block_size=16, return_kl=True
        ... )
        >>> (out.square().mean() + kl).backward()
        >>> out.shape, bool(kl > 0), q_proxy.grad.shape
        (torch.Size([96, 4, 64]), True, torch.Size([96, 2, 64]))
    """
    if isinstance(q, Tensor) and q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be [tokens, heads, dim]")
    options = Options(
        _blocks(top_k_blocks),
        block_size,
        local_blocks,
        init_blocks,
        _scale("softmax_scale", softmax_scale),
        _scale("proxy_scale", proxy_scale),
        max_seqlen_k,
        kl_count,
        _flags(deterministic, select_fp8),
    )
    kl_value = kl_value and (return_kl or kl_metric is not None)
    call = Call(block_indices, cu_seqlens_q, cu_seqlens_k, options, return_kl, return_lse, kl_value, kl_metric)
    results = _attend(q_proxy, k_proxy, q, k, v, call)
    return results if return_kl or return_lse else results[0]


def flash_msa_func(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_k: int,
    scale: float,
    document_list: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    kl_metric: Tensor | None = None,
    kl_value: bool = True,
    block_size: int = 128,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal MiniMax Sparse Attention of a batch, with the interface of Flash-MSA's flash_msa_func.

    Args:
        q_proxy: [B, Hp, S, D]. k_proxy: [B, Hpk, S, D]. q: [B, Hq, S, D]. k, v: [B, Hkv, S, D]. A transposed view of
            [B, S, H, D] is read in place; a contiguous [B, H, S, D] with B > 1 is copied once.
        top_k: keys that each token keeps for each proxy head, in tokens, a multiple of `block_size`.
        scale: factor of the main and of the proxy scores.
        document_list: int [B, S]: tokens with one number in a row of equal ones are one document, and documents do not
            see each other. Counting the documents synchronises with the device; cu_seqlens does not.
        cu_seqlens: int32 [n + 1], offsets of documents in the flattened B * S tokens, with every sequence's begin among
            them. Not together with document_list. Key blocks are counted from the begin of their document. A document
            that goes on in the next sequence is refused on the CPU. On CUDA, where reading offsets would synchronise,
            it is attended to as one document up to S tokens, and with a longer one out is 0.
        kl_metric: a 0-dim fp32 tensor that receives the KL value: in the forward pass, or without `kl_value` in the
            backward pass, where it costs almost nothing.
        kl_value: False: kl_loss is 0 and only carries the gradient, as in Flash-MSA, which saves a pass over the
            selected blocks.
        block_size: keys in a block, in tokens: 64 or 128 on CUDA, at least 16 on the CPU.
        deterministic: bit-identical gradients on every run; also set by torch.use_deterministic_algorithms.

    Returns:
        attn_out [B, S, Hq * D] with gradients in q, k and v, and kl_loss, a 0-dim tensor, fp64 for fp64 inputs, else
        fp32: the mean KL divergence of a token and proxy head, with gradients in q_proxy and k_proxy. Add it to the
        loss to train the proxies.

    Raises:
        TypeError: a dtype does not fit. ValueError: a shape or value does not. RuntimeError: the device cannot.

    Example:
        >>> import torch, flashmsa
        >>> q, k, v = (torch.randn(1, heads, 64, 32, requires_grad=True) for heads in (4, 2, 2))
        >>> q_proxy, k_proxy = (torch.randn(1, heads, 64, 32, requires_grad=True) for heads in (2, 1))
        >>> out, kl_loss = flashmsa.flash_msa_func(q_proxy, k_proxy, q, k, v, 32, 32**-0.5, block_size=16)
        >>> (out.square().mean() + kl_loss).backward()
        >>> out.shape, q.grad.shape
        (torch.Size([1, 64, 128]), torch.Size([1, 4, 64, 32]))
    """
    check_integer("block_size", block_size)
    check_integer("top_k", top_k)
    if block_size <= 0:
        raise ValueError(f"block_size is {block_size}; it must be positive")
    if top_k <= 0 or top_k % block_size != 0:
        raise ValueError(f"top_k is {top_k}; it counts tokens and must be a positive multiple of {block_size}")
    return _batched(
        q_proxy,
        k_proxy,
        q,
        k,
        v,
        top_k // block_size,
        scale,
        document_list,
        cu_seqlens,
        kl_metric,
        kl_value,
        block_size,
        deterministic,
    )


def flash_msa_warmup_func(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_k: int,
    scale: float,
    document_list: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    kl_metric: Tensor | None = None,
    kl_value: bool = True,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Dense causal attention that trains the proxies on every visible key, with the interface of Flash-MSA's
    flash_msa_warmup_func.

    Arguments, results and errors are those of `flash_msa_func`; top_k is accepted and means nothing.

    Example:
        >>> import torch, flashmsa
        >>> q, k, v = (torch.randn(2, heads, 24, 16, requires_grad=True) for heads in (2, 1, 1))
        >>> q_proxy, k_proxy = (torch.randn(2, 1, 24, 16, requires_grad=True) for _ in range(2))
        >>> out, kl_loss = flashmsa.flash_msa_warmup_func(q_proxy, k_proxy, q, k, v, 128, 0.25)
        >>> out.shape, kl_loss.shape
        (torch.Size([2, 24, 32]), torch.Size([]))
    """
    return _batched(
        q_proxy, k_proxy, q, k, v, 0, scale, document_list, cu_seqlens, kl_metric, kl_value, 128, deterministic
    )


def _batched(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    top_k_blocks: int,
    scale: float,
    document_list: Tensor | None,
    cu_seqlens: Tensor | None,
    kl_metric: Tensor | None,
    kl_value: bool,
    block_size: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    if not isinstance(q, Tensor) or q.dim() != 4:
        given = f"shape {tuple(q.shape)}" if isinstance(q, Tensor) else f"type {type(q).__name__}"
        raise (ValueError if isinstance(q, Tensor) else TypeError)(f"q has {given}; it must be a tensor [B, H, S, D]")
    if document_list is not None and cu_seqlens is not None:
        raise ValueError("document_list and cu_seqlens were both given; give one")
    batch, heads, tokens, dim = q.shape
    if document_list is not None:
        cu_seqlens = document_offsets(document_list, batch, tokens)
    elif cu_seqlens is None:
        cu_seqlens = _batch_offsets(batch, tokens, q.device)
    else:
        _refuse_crossing(cu_seqlens, tokens)
    factor = _scale("scale", scale)
    options = Options(top_k_blocks, block_size, 1, 0, factor, factor, tokens, 0, _flags(deterministic))
    call = Call(None, cu_seqlens, cu_seqlens, options, True, False, kl_value, kl_metric)
    out, kl = _attend(q_proxy, k_proxy, q, k, v, call)
    return out, kl


flash_msa_func_warmup = flash_msa_warmup_func
sparse_attention_warmup = flash_msa_warmup_func


def _attend(q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, ...]:
    """out, and kl and lse where the call returns them: by one autograd node in eager PyTorch, by operators wherever
    something traces the call."""
    if not (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and isinstance(q_proxy, Tensor)
        and isinstance(k_proxy, Tensor)
    ):
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "q_proxy": q_proxy, "k_proxy": k_proxy}
        name, other = next((name, x) for name, x in given.items() if not isinstance(x, Tensor))
        raise TypeError(f"{name} is {type(other).__name__}; it must be a tensor")
    metric = call.kl_metric
    if metric is not None and not isinstance(metric, Tensor):
        raise TypeError(f"kl_metric is {type(metric).__name__}; it must be a 0-dim float32 tensor")
    if metric is not None and (metric.dim() != 0 or metric.dtype != torch.float32):
        raise TypeError(
            f"kl_metric is {metric.dtype} of shape {tuple(metric.shape)}; it must be a 0-dim float32 tensor"
        )
    if metric is not None and metric.device != q.device:
        raise ValueError(f"kl_metric is on {metric.device}; it must be on {q.device}, where q is")
    dtype = ops.autocast_dtype(q.device.type)
    if dtype is not None:
        q_proxy, k_proxy, q, k, v = ops.cast_to(dtype, q_proxy, k_proxy, q, k, v)
    if q.is_meta:
        # The operators tell shapes of meta tensors without looking at them.
        plan_of(q_proxy, k_proxy, q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.options)
    if torch.compiler.is_compiling() or _is_traced(q):
        return _attend_by_operators(q_proxy, k_proxy, q, k, v, call)
    results: tuple[Tensor, ...] = AttentionFunction.apply(q_proxy, k_proxy, q, k, v, call)
    return results


def _is_traced(q: Tensor) -> bool:
    """Whether operators are watched or the tensors are not plain: fake and meta tensors, torch.func, selective
    checkpointing, profilers of memory. Everything of the kind works on operators."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or type(q) not in (Tensor, torch.nn.Parameter)
        or q.is_meta
        or torch._C._are_functorch_transforms_active()
    )


# PyTorch 2.4 sends every call of an operator through an autograd function that torch.func refuses.
_CAN_TRANSFORM = hasattr(torch._C, "_any_requires_grad")


def _is_transformed() -> bool:
    """Whether torch.func is at work."""
    if not _CAN_TRANSFORM and torch.compiler.is_compiling():
        return False
    transformed = torch._C._are_functorch_transforms_active()
    if transformed and not _CAN_TRANSFORM:
        raise NotImplementedError(f"custom operators of PyTorch {torch.__version__} do not work under torch.func")
    return transformed


def _attend_by_operators(
    q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> tuple[Tensor, ...]:
    block_indices, cu_seqlens_q, cu_seqlens_k, o, returns_kl, returns_lse, kl_value, kl_metric = call
    attention = ops.TransformedAttention.apply if _is_transformed() else ops.attention
    batched = q.dim() == 4
    q_shape = q.shape
    if batched:
        check_batch({"q_proxy": q_proxy, "k_proxy": k_proxy, "q": q, "k": k, "v": v})
        q_proxy, k_proxy, q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_proxy, k_proxy, q, k, v))
    if o.top_k != 0 and block_indices is None:
        block_indices = ops.select(
            q_proxy.detach(),
            k_proxy.detach(),
            cu_seqlens_q,
            cu_seqlens_k,
            o.top_k,
            o.block_size,
            o.local_blocks,
            o.init_blocks,
            o.proxy_scale,
            o.max_seqlen_k,
            bool(o.flags & _library.FLAG_SELECT_FP8),
        )
    out, kl, lse = attention(
        q_proxy,
        k_proxy,
        q,
        k,
        v,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        o.top_k,
        o.block_size,
        o.softmax_scale,
        o.proxy_scale,
        o.max_seqlen_k,
        o.kl_count,
        bool(o.flags & _library.FLAG_DETERMINISTIC),
        kl_value or kl_metric is not None,
        block_indices,
    )
    if kl_metric is not None:
        value = kl.detach()
        kl_metric.copy_(value)
        # An operator cannot fill a tensor in its backward pass, so the value is had here, and taken off again.
        kl = kl if kl_value else kl - value
    if batched:
        out = out.view(q_shape[0], q_shape[2], q_shape[1] * q_shape[3])
    return (out, *([kl] if returns_kl else []), *([lse] if returns_lse else []))


def document_offsets(document_list: Tensor, batch: int, tokens: int) -> Tensor:
    """cu_seqlens, int32 [n + 1], of documents given as a number for each token, int [batch, tokens].

    A document ends where the number changes and where its sequence ends. Synchronises, since n is counted.

    Example:
        >>> import torch, flashmsa
        >>> flashmsa.document_offsets(torch.tensor([[7, 7, 9], [9, 9, 9]]), 2, 3)
        tensor([0, 2, 3, 6], dtype=torch.int32)
    """
    if not isinstance(document_list, Tensor):
        raise TypeError(f"document_list is {type(document_list).__name__}; it must be a tensor of integers")
    if tuple(document_list.shape) != (batch, tokens):
        raise ValueError(f"document_list has shape {tuple(document_list.shape)}; it must be {(batch, tokens)}")
    if document_list.is_floating_point():
        raise TypeError(f"document_list is {document_list.dtype}; it must hold integers")
    begins = torch.ones((batch, tokens), dtype=torch.bool, device=document_list.device)
    begins[:, 1:] = document_list[:, 1:] != document_list[:, :-1]
    end = torch.full((1,), batch * tokens, dtype=torch.int32, device=document_list.device)
    return torch.cat([begins.flatten().nonzero().flatten().to(torch.int32), end])


def _refuse_crossing(cu_seqlens: Tensor, tokens: int) -> None:
    """Refuses a document that begins in one sequence of a batch and ends in another, where that can be read: on the
    CPU, outside of torch.compile. What else may be wrong with offsets is found by others."""
    if torch.compiler.is_compiling() or type(cu_seqlens) is not Tensor or cu_seqlens.device.type != "cpu":
        return
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() not in (1, 2) or tokens == 0:
        return
    begin, end = (cu_seqlens[:-1], cu_seqlens[1:]) if cu_seqlens.dim() == 1 else (cu_seqlens[0], cu_seqlens[-1])
    crosses = (end > begin) & (begin // tokens != (end - 1) // tokens)
    if crosses.any():
        document = int(crosses.nonzero()[0])
        raise ValueError(
            f"cu_seqlens has a document of tokens {begin[document]} to {end[document]}; it must end where its sequence "
            f"of {tokens} tokens ends, at {(begin[document] // tokens + 1) * tokens}"
        )


_offsets: dict[object, Tensor] = {}
_MOST_OFFSETS = 1024


def _batch_offsets(batch: int, tokens: int, device: torch.device) -> Tensor:
    """cu_seqlens of a batch of equal lengths: made once for each stream, on which it is then used."""
    # What a dispatch mode sees made may be fake, and what it did not see made may be refused. What is made under a
    # transform of torch.func is a wrapper that does not outlive it.
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    ):
        return torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
    on_cuda = device.type == "cuda"
    key = (batch, tokens, device, current_stream(device.index) if on_cuda else 0)
    offsets = _offsets.get(key)
    if offsets is None:
        with torch.inference_mode(False):
            offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
        # Memory of a graph that is being captured belongs to the graph.
        if not (on_cuda and torch.cuda.is_current_stream_capturing()):
            if len(_offsets) >= _MOST_OFFSETS:
                _offsets.clear()
            _offsets[key] = offsets
    return offsets


def check_integer(name: str, value: int) -> None:
    if not isinstance(value, int) and not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {type(value).__name__}; it must be an integer")


def _blocks(top_k_blocks: int) -> int:
    check_integer("top_k_blocks", top_k_blocks)
    if top_k_blocks < 0:
        raise ValueError(f"top_k_blocks is {top_k_blocks}; it must be positive, or 0 for dense attention")
    return top_k_blocks


def _scale(name: str, scale: float | None) -> float:
    """A scale for the library, which takes 0 for the default."""
    if scale is None:
        return 0.0
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"{name} is {scale}; it must be positive and finite")
    return float(scale)


def _flags(deterministic: bool, select_fp8: bool = False) -> int:
    return (_library.FLAG_SELECT_FP8 if select_fp8 else 0) | (
        _library.FLAG_DETERMINISTIC if deterministic or torch.are_deterministic_algorithms_enabled() else 0
    )

"""Context parallelism: one pack of documents over the ranks of a torch.distributed group.

    context = ContextParallel([0, 700_000, 1_000_000], mesh["cp"])      # the same offsets on every rank
    hidden = embed(context.shard(tokens))                               # this rank's rows, and only those
    cos, sin = rotary(context.positions(device))
    ...
    out, kl = attention(q, k, v, q_proxy, k_proxy, context, top_k_blocks=16, return_kl=True)

Every rank holds its own rows of queries, keys, values and proxies. Keys of documents that lie on several ranks travel
(proxy keys first, so that the selection runs while the others are on their way); queries and outputs never do. Each
rank's chunks are fragments of the C API over the gathered keys, so key blocks are counted from the document's begin and
a token selects the same blocks on any number of ranks. What a rank returns is its share: outputs of its rows, gradients
of its rows with every rank's contribution, and its part of the KL loss, whose sum over ranks is the loss.
docs/context_parallel.md has the costs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from ._cp_attention import Attention, Call
from ._cp_exchange import (
    Arrive,
    Depart,
    Layout,
    Route,
    agree,
    arrive,
    arrive_gradient,
    depart,
    depart_gradient,
    gathered,
    settle,
    summed,
    told,
    unshard_index,
)
from ._cp_plan import Piece, Plan, WorkModel, make_plan
from ._plan import Options, plan_of
from .functional import _blocks, _flags, _scale

__all__ = [
    "ContextParallel",
    "Keys",
    "Piece",
    "Plan",
    "WorkModel",
    "attention",
    "make_plan",
    "proxy_loss",
    "select",
]


class ContextParallel:
    """One pack's plan on one group, seen from this rank. Cheap to make; make one for each batch and give it to every
    layer.

    Args:
        plan: a :class:`Plan`, or offsets of the documents [documents + 1], which :func:`make_plan` spreads. A tensor
            on a card is copied to the host, which waits for the card.
        group: a process group, a one-dimensional DeviceMesh (``mesh["cp"]``), or None for the default group. Without
            torch.distributed, None is one rank.
        keep_keys: keep the gathered keys for the backward pass; False: gather them again, which saves
            2 * Hkv * D + Hpk * Dp elements a token of the pack and layer.
        fp32_gradients: sum gradients of 16-bit keys over ranks in fp32; False: in the tensors' type, half the bytes.
        agree: before anything is exchanged, the hosts of the ranks tell each other that all is well, so that an error
            on one rank ends the others with a sentence. Costs a round trip of the hosts; no device is waited for.

    Raises:
        TypeError: offsets that are no integers.
        ValueError: offsets that do not ascend from 0; a plan for another number of ranks.

    Example:
        >>> from flashmsa.context_parallel import ContextParallel
        >>> context = ContextParallel([0, 30, 100])
        >>> context.rows(), context.positions().tolist()[28:33]
        (100, [28, 29, 0, 1, 2])
    """

    def __init__(
        self,
        plan: Plan | Sequence[int] | Tensor,
        group: Any = None,
        *,
        keep_keys: bool = True,
        fp32_gradients: bool = True,
        agree: bool = True,
    ) -> None:
        if isinstance(group, dist.DeviceMesh):
            group = group.get_group()
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        if not isinstance(plan, Plan):
            plan = make_plan(plan.tolist() if isinstance(plan, Tensor) else plan, self.world)
        if plan.world != self.world:
            raise ValueError(f"the plan is for {plan.world} ranks and the group has {self.world}")
        self.plan = plan
        self.keep_keys = keep_keys
        self.fp32_gradients = fp32_gradients
        self._name = "" if group is None else group.group_name
        self._words = self._name if agree and self.world > 1 else ""
        self._plan_signature = zlib.crc32(repr((plan.cu_seqlens, plan.total, plan.pieces)).encode())
        self._layouts: dict[torch.device, Layout] = {}
        self._unshard: dict[torch.device, Tensor] = {}

    # ---- Rows of the pack and of this rank

    def rows(self) -> int:
        """How many rows this rank owns."""
        return self.plan.rows[self.rank]

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's rows of a tensor that holds the whole pack, [..., total, ...] -> [..., rows(), ...].

        Labels of the next token must be shifted before: the last row of a chunk is followed by another rank's.

        Raises:
            ValueError: a dimension of another size than the pack.

        Example:
            >>> import torch
            >>> from flashmsa.context_parallel import ContextParallel
            >>> ContextParallel([0, 2, 4]).shard(torch.arange(4)).tolist()
            [0, 1, 2, 3]
        """
        if x.shape[dim] != self.plan.total:
            raise ValueError(f"dimension {dim} of x has {x.shape[dim]} rows; the pack has {self.plan.total}")
        return x.index_select(dim, self._layout(x.device).rows)

    def unshard(self, x: Tensor, dim: int = 0) -> Tensor:
        """The whole pack from every rank's rows, [..., rows(), ...] -> [..., total, ...], on every rank. Rows in no
        document are 0. Without gradient. Every rank must call it.

        Raises:
            ValueError: a dimension of another size than this rank's rows.

        Example:
            >>> import torch
            >>> from flashmsa.context_parallel import ContextParallel
            >>> ContextParallel([0, 2, 4]).unshard(torch.arange(4)).tolist()
            [0, 1, 2, 3]
        """
        if x.shape[dim] != self.rows():
            raise ValueError(f"dimension {dim} of x has {x.shape[dim]} rows; this rank owns {self.rows()}")
        with torch.no_grad():
            x = x.detach().movedim(dim, 0)
            self._check(lambda: None, (x,), "unshard")
            result = x.new_zeros((self.plan.total + 1, *x.shape[1:]))
            most = max(self.plan.rows)
            if self.world == 1 or most == 0:
                result[self._layout(x.device).rows] = x
            else:
                send = x.new_zeros((most, *x.shape[1:]))
                send[: x.shape[0]] = x
                everything = gathered(send, self.world, self._name)
                index = self._unshard.get(x.device)
                if index is None:
                    index = self._unshard[x.device] = unshard_index(self.plan, x.device)
                result[index] = everything
            return result[:-1].movedim(0, dim)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Position of each of this rank's rows in its document, int64 [rows()]: for rotary embeddings.

        Example:
            >>> from flashmsa.context_parallel import ContextParallel
            >>> ContextParallel([0, 2, 5]).positions().tolist()
            [0, 1, 0, 1, 2]
        """
        return self._layout(torch.device(device)).positions

    def sum(self, x: Tensor) -> Tensor:
        """x summed over the ranks, without gradient: the KL loss for a log, say. Every rank must call it.

        Example:
            >>> import torch
            >>> from flashmsa.context_parallel import ContextParallel
            >>> ContextParallel([0, 2]).sum(torch.tensor(1.5))
            tensor(1.5000)
        """
        if self.world == 1:
            return x.detach().clone()
        self._check(lambda: None, (x.detach(),), "sum")
        return summed(x.detach(), self._name)

    # ---- The exchange

    def gather(self, k: Tensor, v: Tensor, k_proxy: Tensor | None) -> Keys:
        """Sends this rank's keys on their way. Between this call and :meth:`Keys.attend` is the place for work that
        needs no keys, such as the projection of the queries: it overlaps with the trip, and its backward pass with the
        trip of the gradients.

        Args:
            k, v: [rows(), Hkv, D]. k_proxy: [rows(), Hpk, Dp], or None for dense attention without proxies. Autocast
                casts them.

        Raises:
            TypeError, ValueError: tensors that do not fit. RuntimeError: an error on another rank.

        Example:
            >>> import torch
            >>> from flashmsa.context_parallel import ContextParallel
            >>> context = ContextParallel([0, 50])
            >>> keys = context.gather(torch.randn(50, 2, 64), torch.randn(50, 2, 64), torch.randn(50, 1, 64))
            >>> keys.attend(torch.randn(50, 4, 64), torch.randn(50, 2, 64), top_k_blocks=2).shape
            torch.Size([50, 4, 64])
        """
        k, v, k_proxy = _autocast(k, v, k_proxy)
        self._check(lambda: self._check_rows(k=k, v=v, k_proxy=k_proxy), (k, v, k_proxy))
        return self._gather(k, v, k_proxy)

    def _gather(self, k: Tensor, v: Tensor, k_proxy: Tensor | None) -> Keys:
        layout = self._layout(k.device)
        if layout.padded == 0:
            return Keys(self, layout, None, k, v, k_proxy, ())
        route = Route(layout.local_shared, layout.padded, layout.shared, self.world, self._name)
        fp32 = self.fp32_gradients and k.dtype in (torch.bfloat16, torch.float16)
        dtype = torch.float32 if fp32 else k.dtype
        trips = tuple(None if x is None else Depart.apply(x, route, dtype) for x in (k_proxy, k, v))
        return Keys(self, layout, route, k, v, k_proxy, trips)

    def _layout(self, device: torch.device) -> Layout:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        layout = self._layouts.get(device)
        if layout is None:
            layout = self._layouts[device] = Layout(self.plan, self.rank, device)
        return layout

    def _check_rows(self, **tensors: Tensor | None) -> None:
        for name, x in tensors.items():
            if x is None and name in ("q_proxy", "k_proxy"):
                continue
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} is {type(x).__name__}; it must be a tensor")
            if x.dim() != 3 or x.shape[0] != self.rows():
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; it must be [rows, heads, dim], and rank {self.rank} of this "
                    f"plan owns {self.rows()} rows"
                )

    def _check(self, check: Any, tensors: Sequence[Any], options: object = ()) -> None:
        """Runs a check on every rank, and raises on all of them if it raises on one, or if the calls differ."""
        if not self._words or torch.compiler.is_compiling():
            check()
            return
        error, signature = None, 0
        try:
            check()
            facts = [x if x is None else (str(x.dtype), tuple(x.shape[1:]), x.requires_grad) for x in tensors]
            grad = torch.is_grad_enabled()
            choices = (self.keep_keys, self.fp32_gradients, options)
            signature = zlib.crc32(repr((self._plan_signature, facts, grad, choices)).encode())
        except Exception as caught:
            error = caught
        agree(self._words, signature, error)


class Keys(NamedTuple):
    """Keys on their way, made by :meth:`ContextParallel.gather`. For one call of :meth:`attend`."""

    context: ContextParallel
    layout: Layout
    route: Route | None  # None where nothing travels
    k: Tensor
    v: Tensor
    k_proxy: Tensor | None
    trips: tuple[tuple[Tensor, Tensor, Tensor] | None, ...]  # of k_proxy, k, v

    def attend(
        self,
        q: Tensor,
        q_proxy: Tensor | None,
        top_k_blocks: int,
        softmax_scale: float | None = None,
        proxy_scale: float | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> Any:
        """The second half of :func:`attention`.

        Args:
            q: [rows, Hq, D]. q_proxy: [rows, Hp, Dp], or None for dense attention without proxies.
            The others, the results and the errors are those of :func:`attention`.

        Example:
            >>> import torch
            >>> from flashmsa.context_parallel import ContextParallel
            >>> context = ContextParallel([0, 50])
            >>> keys = context.gather(torch.randn(50, 2, 64), torch.randn(50, 2, 64), torch.randn(50, 1, 64))
            >>> out, kl = keys.attend(torch.randn(50, 4, 64), torch.randn(50, 2, 64), 0, return_kl=True)
            >>> out.shape, kl.shape
            (torch.Size([50, 4, 64]), torch.Size([]))
        """
        q, q_proxy = _autocast(q, q_proxy)
        choices = _Choices(top_k_blocks, softmax_scale, proxy_scale, deterministic, **options)
        context, tensors = self.context, (q, self.k, self.v, q_proxy, self.k_proxy)
        context._check(lambda: _check_call(context, tensors, choices), tensors, choices.told())
        return _attend(q, q_proxy, self, choices)

    def _arrive(self, trip: int, x: Tensor | None) -> tuple[Any, Any]:
        """The keys of a call without gradient, and what takes their gradient."""
        if x is None or self.route is None:
            return None if x is None else x.detach(), x
        index = (self.layout.gather_index, self.layout.scatter_index)
        trip_of_x: Any = self.trips[trip]
        arrived: tuple[Tensor, Tensor] = Arrive.apply(*trip_of_x, x.detach(), *index, self.route)
        return arrived


def _autocast(*tensors: Any) -> list[Any]:
    for x in tensors:
        if isinstance(x, Tensor):
            return ops.cast_to(ops.autocast_dtype(x.device.type), *tensors)
    return list(tensors)


def _expanded(x: Tensor, rows: int) -> Tensor:
    """A tensor of x's kind with another number of rows and no memory, for checks of shapes."""
    return x.new_empty(()).expand(rows, *x.shape[1:])


# ---- Attention ----------------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    context: ContextParallel,
    top_k_blocks: int,
    softmax_scale: float | None = None,
    proxy_scale: float | None = None,
    deterministic: bool = False,
    **options: Any,
) -> Any:
    """Causal MiniMax Sparse Attention of this rank's rows over the whole documents.

    Args:
        q: [rows, Hq, D], this rank's rows, as all tensors here. k, v: [rows, Hkv, D]. q_proxy: [rows, Hp, Dp]. k_proxy:
            [rows, Hpk, Dp]. Without proxies (None, None), attention is dense and there is no loss.
        context: plan and group. Every rank of the group must make the call, one without rows too.
        top_k_blocks, softmax_scale, proxy_scale, deterministic: as in :func:`flashmsa.flash_msa_varlen_func`; 0 blocks
            is dense attention.
        block_size: keys in a block, default 128.
        local_blocks, init_blocks: newest and first blocks always kept, default 1 and 0.
        block_indices: int32 [Hp, rows, top_k_blocks], a selection to use instead of one by score.
        select_fp8: score blocks in FP8 where the card has it.
        kl_value: False: the KL returned is 0 and only carries the gradient.
        return_kl: also return this rank's part of the KL loss, 0-dim fp32. Its divisor is the count of the whole pack.
        return_lse: also return lse [Hq, rows] in fp32, without gradient.

    Returns:
        out [rows, Hq, D], or a tuple of out, then kl and lse where asked for. Where a key takes part in any rank's
        loss, its gradient holds that part.

    Raises:
        TypeError, ValueError: an argument of this rank does not fit. RuntimeError: an error on another rank, or the
        device cannot.

    Example:
        >>> import torch
        >>> from flashmsa.context_parallel import ContextParallel, attention
        >>> q, k, v = (torch.randn(96, heads, 64, requires_grad=True) for heads in (4, 2, 2))
        >>> q_proxy, k_proxy = (torch.randn(96, heads, 64, requires_grad=True) for heads in (2, 1))
        >>> context = ContextParallel([0, 40, 96])
        >>> out, kl = attention(q, k, v, q_proxy, k_proxy, context, 2, block_size=16, return_kl=True)
        >>> (out.square().mean() + kl).backward()
        >>> out.shape, k.grad.shape
        (torch.Size([96, 4, 64]), torch.Size([96, 2, 64]))
    """
    q, k, v, q_proxy, k_proxy = tensors = _autocast(q, k, v, q_proxy, k_proxy)
    choices = _Choices(top_k_blocks, softmax_scale, proxy_scale, deterministic, **options)
    context._check(lambda: _check_call(context, tensors, choices), tensors, choices.told())
    if not choices.return_kl and k_proxy is not None:
        k_proxy = k_proxy.detach()
    return _attend(q, q_proxy, context._gather(k, v, k_proxy), choices)


class _Choices:
    """The options of a call."""

    def __init__(
        self,
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
        kl_value: bool = True,
        return_kl: bool = False,
        return_lse: bool = False,
    ) -> None:
        self.top_k, self.softmax_scale, self.proxy_scale = top_k_blocks, softmax_scale, proxy_scale
        self.deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        self.block_size, self.local_blocks, self.init_blocks = block_size, local_blocks, init_blocks
        self.block_indices, self.select_fp8 = block_indices, select_fp8
        self.kl_value, self.return_kl, self.return_lse = kl_value, return_kl, return_lse

    def told(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        return self.top_k, self.block_size, self.return_kl, self.block_indices is None

    def options(self, context: ContextParallel, layout: Layout, proxy_heads: int) -> Options:
        return Options(
            _blocks(self.top_k),
            self.block_size,
            self.local_blocks,
            self.init_blocks,
            _scale("softmax_scale", self.softmax_scale),
            _scale("proxy_scale", self.proxy_scale),
            layout.longest,
            max(context.plan.total * proxy_heads, 1),
            _flags(self.deterministic, self.select_fp8),
        )


def _check_call(context: ContextParallel, tensors: Sequence[Any], choices: _Choices) -> None:
    """Everything that shapes alone can show, as if the keys were gathered already."""
    q, k, v, q_proxy, k_proxy = tensors
    context._check_rows(q=q, k=k, v=v, q_proxy=q_proxy, k_proxy=k_proxy)
    if (q_proxy is None) != (k_proxy is None):
        raise ValueError("one of q_proxy and k_proxy is None; give both or none")
    if q_proxy is None and (choices.top_k or choices.return_kl):
        raise ValueError(f"q_proxy is None; top_k_blocks {choices.top_k} or return_kl needs proxies")
    layout = context._layout(q.device)
    options = choices.options(context, layout, _proxy_heads(q_proxy, k))
    if not torch.compiler.is_compiling():
        heads = _proxy_heads(q_proxy, k)
        k_proxy, k, v = (None if x is None else _expanded(x, layout.keys) for x in (k_proxy, k, v))
        plan_of(q_proxy, k_proxy, q, k, v, layout.q_bounds, layout.k_bounds, options, heads)


def _proxy_heads(q_proxy: Tensor | None, k: Tensor) -> int:
    return k.shape[1] if q_proxy is None else q_proxy.shape[1]


def _attend(q: Tensor, q_proxy: Tensor | None, keys: Keys, choices: _Choices) -> Any:
    words = keys.context._words if keys.route is not None else ""
    if torch.compiler.is_compiling():
        return _attend_here(q, q_proxy, keys, choices, words)
    try:
        return told(words, lambda: _attend_here(q, q_proxy, keys, choices, words), leave_together=False)
    except Exception:
        for trip in keys.trips:
            if trip is not None:
                settle(trip[0])
        raise


def _attend_here(q: Tensor, q_proxy: Tensor | None, keys: Keys, choices: _Choices, words: str) -> Any:
    context, layout = keys.context, keys.layout
    proxy_heads = _proxy_heads(q_proxy, keys.k)
    o = choices.options(context, layout, proxy_heads)
    bounds = (layout.q_bounds, layout.k_bounds)
    k_proxy, k_proxy_carrier = keys._arrive(0, keys.k_proxy)
    schedule, block_indices = None, choices.block_indices
    if o.top_k > 0 and block_indices is None and q_proxy is not None:
        block_indices = ops.select(
            q_proxy.detach(), k_proxy, *bounds, o.top_k, o.block_size, o.local_blocks, o.init_blocks, o.proxy_scale,
            o.max_seqlen_k, choices.select_fp8,
        )  # fmt: skip
    k, k_carrier = keys._arrive(1, keys.k)
    v, v_carrier = keys._arrive(2, keys.v)
    if block_indices is not None:
        schedule = ops.schedule(block_indices, q.detach(), k, *bounds, o.block_size, o.max_seqlen_k)
    call = Call(
        proxy_heads,
        o.top_k,
        o.block_size,
        o.softmax_scale,
        o.proxy_scale,
        o.max_seqlen_k,
        o.kl_count,
        choices.deterministic,
        choices.kl_value and choices.return_kl,
        k_carrier.dtype != k.dtype,
        context.keep_keys or keys.route is None,
        words,
        keys.route,
    )
    own = [None if x is None else x.detach() for x in (keys.k_proxy, keys.k, keys.v)]
    out, kl, lse = Attention.apply(
        q_proxy, k_proxy_carrier, q, k_carrier, v_carrier, k_proxy, k, v, *own, schedule, *bounds, layout.gather_index,
        call,
    )  # fmt: skip
    if not (choices.return_kl or choices.return_lse):
        return out
    return (out, *([kl] if choices.return_kl else []), *([lse] if choices.return_lse else []))


# ---- Single operations, without autograd --------------------------------------------------------------------------


def _gathered(context: ContextParallel, layout: Layout, *tensors: Tensor) -> tuple[Route | None, list[Tensor]]:
    """Each of the tensors with the rows of all ranks that this one needs."""
    if layout.padded == 0:
        return None, [x.detach() for x in tensors]
    route = Route(layout.local_shared, layout.padded, layout.shared, context.world, context._name)
    pending = [(depart(x.detach(), route), x.detach()) for x in tensors]
    return route, [arrive(p, x, layout.gather_index, route) for p, x in pending]


def select(
    q_proxy: Tensor,
    k_proxy: Tensor,
    context: ContextParallel,
    top_k_blocks: int,
    proxy_scale: float | None = None,
    *,
    block_size: int = 128,
    local_blocks: int = 1,
    init_blocks: int = 0,
    select_fp8: bool = False,
) -> Tensor:
    """The selection of this rank's rows: int32 [Hp, rows, top_k_blocks], blocks counted from each document's begin,
    ascending, then -1. Unsharded along dimension 1 it is that of one process. Every rank must make the call.

    Args:
        q_proxy: [rows, Hp, Dp]. k_proxy: [rows, Hpk, Dp]. The others as in :func:`flashmsa.flash_msa_varlen_func`.

    Raises:
        TypeError, ValueError: an argument of this rank does not fit. RuntimeError: an error on another rank.

    Example:
        >>> import torch
        >>> from flashmsa.context_parallel import ContextParallel, select
        >>> select(torch.randn(50, 2, 64), torch.randn(50, 1, 64), ContextParallel([0, 50]), 4, block_size=16).shape
        torch.Size([2, 50, 4])
    """
    check = (q_proxy, k_proxy)
    context._check(lambda: context._check_rows(q_proxy=q_proxy, k_proxy=k_proxy), check, (top_k_blocks, block_size))
    layout = context._layout(q_proxy.device)
    _, (keys,) = _gathered(context, layout, k_proxy)
    return ops.select(
        q_proxy.detach(), keys, layout.q_bounds, layout.k_bounds, top_k_blocks, block_size, local_blocks, init_blocks,
        _scale("proxy_scale", proxy_scale), layout.longest, select_fp8,
    )  # fmt: skip


def proxy_loss(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    block_indices: Tensor | None,
    context: ContextParallel,
    softmax_scale: float | None = None,
    proxy_scale: float | None = None,
    deterministic: bool = False,
    *,
    block_size: int = 128,
    grad_kl: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of the KL loss with the gradients of its proxies, at once. Every rank must make the call.

    Args:
        q_proxy: [rows, Hp, Dp]. k_proxy: [rows, Hpk, Dp]. q: [rows, Hq, D]. k: [rows, Hkv, D].
        lse: fp32 [Hq, rows], from :func:`attention`.
        block_indices: int32 [Hp, rows, top_k_blocks], or None for the dense form.
        grad_kl: dL/dKL, one fp32 value on the device; None is 1.

    Returns:
        kl [] in fp32, dq_proxy and dk_proxy like q_proxy and k_proxy; every rank's rows have taken part in dk_proxy.

    Raises:
        TypeError, ValueError: an argument of this rank does not fit. RuntimeError: an error on another rank.

    Example:
        >>> import torch
        >>> from flashmsa.context_parallel import ContextParallel, attention, proxy_loss
        >>> q, k, q_proxy, k_proxy = (torch.randn(50, heads, 64) for heads in (4, 2, 2, 1))
        >>> context = ContextParallel([0, 50])
        >>> _, lse = attention(q, k, k, q_proxy, k_proxy, context, 0, return_lse=True)
        >>> kl, dq_proxy, dk_proxy = proxy_loss(q_proxy, k_proxy, q, k, lse, None, context)
        >>> dk_proxy.shape
        torch.Size([50, 1, 64])
    """
    top_k = 0 if block_indices is None else block_indices.shape[2]
    choices = _Choices(top_k, softmax_scale, proxy_scale, deterministic, block_size=block_size)
    tensors = (q_proxy, k_proxy, q, k)
    context._check(lambda: _check_call(context, (q, k, k, q_proxy, k_proxy), choices), tensors, choices.told())
    layout = context._layout(q.device)
    o = choices.options(context, layout, q_proxy.shape[1])
    route, (proxy_keys, keys) = _gathered(context, layout, k_proxy, k)
    bounds = (layout.q_bounds, layout.k_bounds)
    schedule = None
    if block_indices is not None:
        schedule = ops.schedule(block_indices, q.detach(), keys, *bounds, block_size, o.max_seqlen_k)
    fp32 = route is not None and context.fp32_gradients and k.dtype in (torch.bfloat16, torch.float16)
    kl, dq_proxy, dk_proxy = ops.proxy_loss(
        q_proxy.detach(), proxy_keys, q.detach(), keys, lse, schedule, grad_kl, *bounds, top_k, block_size,
        o.softmax_scale, o.proxy_scale, o.max_seqlen_k, o.kl_count, choices.deterministic, fp32,
    )  # fmt: skip
    if route is not None:
        pending = depart_gradient(dk_proxy, layout.scatter_index, route)
        dk_proxy = arrive_gradient(pending, dk_proxy[layout.shared :], route, k_proxy.dtype)
    return kl, dq_proxy, dk_proxy

"""What travels between the ranks of a context-parallel group: keys before the attention, their gradients after it, and
before either a word between the hosts.

An exchange is cut in two, so that other work can be put between: rows *depart* (the collective starts) and *arrive*
(the stream waits for it). Each half is an autograd node, and in the backward pass they run in turn: gradients depart
where rows arrived, and arrive where rows departed. Everything created between the two halves overlaps with both trips.

Gradients of 16-bit keys may travel and be summed in fp32, but autograd casts a gradient to the type of its tensor. So
each node hands on a *carrier* beside the rows: zeros of the wanted type that take no memory (stride 0) and that nobody
reads; the gradient of the rows is given to the carrier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from ._cp_plan import Plan

T = TypeVar("T")
_collectives = torch.ops._c10d_functional


class Layout:
    """A plan seen from one rank, as tensors on one device.

    The keys of a call are those of the shared documents in the order of the pack, [shared], then the rank's own.

    Attributes:
        rows: int64 [rows], the pack's row of each of the rank's.
        positions: int64 [rows], position in the document.
        q_bounds, k_bounds: int32 [2, pieces], begins and ends of the fragments.
        gather_index: int64 [shared], where each shared row lies in what all ranks sent, [world * padded].
        scatter_index: int64 [world * padded], which shared row each row to be sent back is; padding repeats row 0.
        local_shared: the rank's first rows, whose keys travel. padded: most of any rank. keys: rows of the call's keys.
        longest: no fragment sees more keys.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        pieces = plan.pieces[rank]
        shared, at = {}, 0
        for document in sorted(plan.shared_documents):
            shared[document] = at
            at += plan.length(document)
        self.shared = at
        self.total = plan.total
        self.count = plan.rows[rank]
        self.local_shared = plan.shared_rows[rank]
        self.padded = max(plan.shared_rows)
        self.keys = self.shared + self.count - self.local_shared
        self.longest = max([p.end for p in pieces], default=0)

        def put(values: Tensor) -> Tensor:
            if device.type != "cuda":
                return values.to(device)
            return values.pin_memory().to(device, non_blocking=True)

        self.positions = put(_concatenated([torch.arange(p.begin, p.end) for p in pieces]))
        self.rows = put(_global_rows(plan, rank))
        bounds, row, own = [], 0, self.shared
        for p in pieces:
            first = shared.get(p.document, own)
            bounds.append((row, row + p.end - p.begin, first, first + p.end))
            row += p.end - p.begin
            own += 0 if p.document in shared else p.end
        fragments = put(torch.tensor(bounds, dtype=torch.int32).view(-1, 4).t().contiguous())
        self.q_bounds, self.k_bounds = fragments[:2], fragments[2:]
        scatter = torch.zeros(plan.world, self.padded, dtype=torch.int64)
        for other in range(plan.world):
            order = [p for p in plan.pieces[other] if p.document in shared]
            rows = [torch.arange(p.begin, p.end) + shared[p.document] for p in order]
            scatter[other, : plan.shared_rows[other]] = _concatenated(rows)
        self.scatter_index = put(scatter.flatten())
        gather = torch.empty(self.shared, dtype=torch.int64)
        for other, count in enumerate(plan.shared_rows):
            gather[scatter[other, :count]] = torch.arange(count) + other * self.padded
        self.gather_index = put(gather)


def _concatenated(ranges: list[Tensor]) -> Tensor:
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def _global_rows(plan: Plan, rank: int) -> Tensor:
    return _concatenated([torch.arange(p.begin, p.end) + plan.cu_seqlens[p.document] for p in plan.pieces[rank]])


def unshard_index(plan: Plan, device: torch.device) -> Tensor:
    """int64 [world * most rows of a rank]: the pack's row of each gathered one; `total` for padding."""
    index = torch.full((plan.world, max(plan.rows)), plan.total, dtype=torch.int64)
    for rank, count in enumerate(plan.rows):
        index[rank, :count] = _global_rows(plan, rank)
    return index.flatten().to(device)


def _start_gather(x: Tensor, world: int, group: str) -> Tensor:
    """Starts to gather every rank's x, one after the other along dimension 0: pending.

    On the CPU each rank sends its rows to all in an all-to-all. Gloo's threads (PyTorch 2.13) write the name of what
    they finished to one string without a lock. A name of more than 15 characters lies on the heap, and is freed twice
    when two collectives end at once; ALLGATHER_COALESCED is such a name, ALLTOALL is not.
    """
    pending: Tensor
    if x.device.type == "cpu":
        rows = [x.shape[0]] * world
        pending = _collectives.all_to_all_single(torch.cat([x] * world), rows, rows, group)
    else:
        pending = _collectives.all_gather_into_tensor(x, world, group)
    return pending


def gathered(x: Tensor, world: int, group: str) -> Tensor:
    """Every rank's x, one after the other along dimension 0."""
    everything: Tensor = _collectives.wait_tensor(_start_gather(x, world, group))
    return everything


def summed(x: Tensor, group: str) -> Tensor:
    """The sum of every rank's x."""
    total: Tensor = _collectives.wait_tensor(_collectives.all_reduce(x, "sum", group))
    return total


# ---- The exchange -------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """Sizes and group of an exchange: plain values, so that torch.compile can trace what takes them."""

    local_shared: int
    padded: int
    shared: int
    world: int
    group: str  # name of the process group


def depart(x: Tensor, route: Route) -> Tensor:
    """Starts to gather the first rows of x [rows, heads, dim] from all ranks: [world * padded, heads, dim], pending."""
    send = x[: route.local_shared]
    if route.local_shared < route.padded:
        send = F.pad(send, (0, 0, 0, 0, 0, route.padded - route.local_shared))
    return _start_gather(send.contiguous(), route.world, route.group)


def arrive(pending: Tensor, x: Tensor, gather_index: Tensor, route: Route) -> Tensor:
    """Waits for `depart`, and puts the keys in order: shared documents as in the pack, then the rank's own of x."""
    shared = _collectives.wait_tensor(pending).index_select(0, gather_index)
    return torch.cat([shared, x[route.local_shared :]]) if x.shape[0] > route.local_shared else shared


def settle(pending: Tensor) -> None:
    """Waits for `depart` where nothing will arrive: memory that a collective still writes must not be handed out."""
    _collectives.wait_tensor(pending)


def depart_gradient(gradient: Tensor, scatter_index: Tensor, route: Route) -> Tensor:
    """Starts to sum the gradient of all shared keys over the ranks: [padded, heads, dim], pending."""
    send = gradient[: route.shared].index_select(0, scatter_index)
    pending: Tensor = _collectives.reduce_scatter_tensor(send, "sum", route.world, route.group)
    return pending


def arrive_gradient(pending: Tensor, own: Tensor, route: Route, dtype: torch.dtype) -> Tensor:
    """Waits for `depart_gradient`: the gradient of the rank's rows, with `own` for those that did not travel."""
    shared = _collectives.wait_tensor(pending)[: route.local_shared]
    return (torch.cat([shared, own]) if own.shape[0] > 0 else shared).to(dtype)


def _carrier(rows: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=like.device).expand(rows, *like.shape[1:])


class Depart(torch.autograd.Function):
    """x -> pending rows, carrier of the gradients that travel [padded], carrier of the others [rows - local_shared]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        ctx.route, ctx.dtype = route, x.dtype
        pending = depart(x, route)
        ctx.mark_non_differentiable(pending)
        ctx.set_materialize_grads(False)  # zeros for `pending` would be as large as it is
        return pending, _carrier(route.padded, x, dtype), _carrier(x.shape[0] - route.local_shared, x, dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, pending: Tensor, own: Tensor) -> tuple[Tensor, None, None]:
        return arrive_gradient(pending, own, ctx.route, ctx.dtype), None, None


class Arrive(torch.autograd.Function):
    """(pending rows, two carriers, x) -> keys [shared + own] and their carrier."""

    @staticmethod
    def forward(
        ctx: Any,
        pending: Tensor,
        travelling: Tensor,
        own: Tensor,
        x: Tensor,
        gather_index: Tensor,
        scatter_index: Tensor,
        route: Route,
    ) -> tuple[Tensor, Tensor]:
        ctx.route = route
        keys = arrive(pending, x, gather_index, route)
        carrier = _carrier(keys.shape[0], keys, travelling.dtype)
        ctx.save_for_backward(scatter_index, carrier)
        ctx.mark_non_differentiable(keys)
        ctx.set_materialize_grads(False)
        return keys, carrier

    @staticmethod
    def backward(ctx: Any, _: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        scatter_index, carrier = ctx.saved_tensors
        if gradient is None:  # here; another rank may have one, and waits
            gradient = carrier.contiguous()
        pending = depart_gradient(gradient, scatter_index, ctx.route)
        return None, pending, gradient[ctx.route.shared :], None, None, None, None


# ---- The word between the hosts -----------------------------------------------------------------------------------

_host_groups: dict[str, tuple[Any, Any]] = {}
_SENTENCE_BYTES = 1024


def _host_group(name: str) -> Any:
    """Gloo between the same ranks that carries nothing but words, so that they stay in step whatever else a rank does
    on the group itself. Not made by `new_group`, which needs every rank of the world."""
    group = distributed_c10d._resolve_process_group(cast(Any, name))
    known = _host_groups.get(name)
    if known is None or known[0] is not group:
        store = dist.PrefixStore(f"flashmsa_words/{name}", distributed_c10d._get_default_store())
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        host = dist.ProcessGroupGloo(store, rank, world, default_pg_timeout)
        known = _host_groups[name] = (group, host)
    return known[1]


def _gathered_words(host: Any, word: Tensor) -> Tensor:
    """[ranks, ...] from every rank's word."""
    words = [torch.empty_like(word) for _ in range(host.size())]
    host.allgather([words], [word]).wait()
    return torch.stack(words)


def agree(name: str, signature: int, error: Exception | None = None) -> None:
    """Waits until every rank of the group has come here, and raises on all of them if one came with an error or with
    another signature than the first. It comes before every exchange, so no rank enters one that another will not.
    Hosts only: no device is waited for.

    A rank whose error comes between two exchanges calls this too: its word meets the others' next one.

    Raises:
        RuntimeError: another rank failed, has ended or disagrees. Whatever `error` is, on the rank that brings it.
    """
    try:
        host = _host_group(name)
        words = _gathered_words(host, torch.tensor([error is not None, signature]))
        failed, signatures = words[:, 0].nonzero().flatten().tolist(), words[:, 1]
        sentences = []
        if failed:
            text = f"{type(error).__name__}: {error}".encode()[:_SENTENCE_BYTES]
            padded = torch.frombuffer(bytearray(text.ljust(_SENTENCE_BYTES)), dtype=torch.uint8)
            sentences = [bytes(x.tolist()).decode(errors="replace").rstrip() for x in _gathered_words(host, padded)]
    except (RuntimeError, ValueError) as lost:
        if error is not None:
            raise error from lost
        raise RuntimeError(f"a rank of the context-parallel group has ended, or does not answer: {lost}") from lost
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"rank {failed[0]} of the context-parallel group failed: {sentences[failed[0]]}")
    others = (signatures != signatures[0]).nonzero().flatten().tolist()
    if others:
        raise RuntimeError(
            f"ranks {others} of the context-parallel group call with another plan, dtype, head count, option or "
            f"requires_grad than rank 0; this is rank {host.rank()}"
        )


def told(name: str, compute: Callable[[], T], leave_together: bool) -> T:
    """The result of work between two exchanges. An error in it is told to the other ranks, then raised; with
    `leave_together` they wait here until all have done theirs. An empty name: no words."""
    if not name or torch.compiler.is_compiling():
        return compute()
    try:
        result = compute()
    except Exception as error:
        agree(name, 0, error)
        raise
    if leave_together:
        agree(name, 0)
    return result

"""Which rank of a context-parallel group owns which rows: a plan from document lengths alone, in plain Python.

What is balanced is modelled work, not tokens: scores grow with the prefix that a token sees, attention only until the
support of a selection is full. Whole documents go to the least loaded rank as long as they fit. The others are laid one
after the other along the room that is left on the ranks and cut where a rank is full, always in *mirrored* pairs: a
rank that gets rows [a, b) from the front of a document of n rows gets [n - b, n - a) from its back, where the rows see
as much more as those see less. So a pair costs the same wherever it lies, and ranks with equal work have about equal
tokens too.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import operator
from collections.abc import Sequence

# Rooms and overfull ranks below this part of a rank's share are not worth a cut.
_TOLERANCE = 0.005


@dataclasses.dataclass(frozen=True)
class WorkModel:
    """What a layer's forward and backward pass costs, in any unit: a token that sees n keys costs
    ``scored * n + attended * min(n, support) + token``.

    The defaults are microseconds on one H200 with the heads of MiniMax-M3 (64/4/4/1, dimension 128, 16 blocks of 128,
    bf16), from a step of 65,536 tokens: 2.99 ms for the scores of 2.15e9 pairs, 40.8 ms for all else. To balance whole
    layers, add to ``token`` what a token costs outside the attention.

    Args:
        scored: a token and a key that it sees; in dense mode, everything about the pair.
        attended: a token and a key that it attends to.
        token: a token, whatever it sees.
        support: most keys that a token attends to, ``top_k_blocks * block_size``; 0 in dense mode.

    Example:
        >>> from flashmsa.context_parallel import WorkModel
        >>> WorkModel(scored=1.0, attended=0.0, token=0.0, support=0).of_rows(2, 4)
        7.0
    """

    scored: float = 1.4e-6
    attended: float = 3.1e-4
    token: float = 0.0
    support: int = 16 * 128

    def of_rows(self, begin: int, end: int) -> float:
        """Work of the rows [begin, end) of a document."""
        return self._prefix(end) - self._prefix(begin)

    def _prefix(self, n: int) -> float:
        full = min(n, self.support)
        attended = full * (full + 1) // 2 + (n - full) * self.support
        return self.scored * (n * (n + 1) // 2) + self.attended * attended + self.token * n


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive rows of one document: [begin, end) counted from the document's first row."""

    document: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who owns which rows of a pack. Made by :func:`make_plan`; equal inputs give equal plans on every rank.

    A document on more than one rank is *shared*: its keys travel. The keys of the others stay where they are. A rank
    holds the rows of its pieces one after the other: first the shared documents in the order of the pack, then its own;
    within a document in ascending order.

    Attributes:
        cu_seqlens: offsets of the documents, [documents + 1].
        total: rows of the pack; those in no document belong to no rank.
        world: number of ranks.
        model: the work that was balanced.
        pieces: for each rank its pieces in the order in which it holds them.
    """

    cu_seqlens: tuple[int, ...]
    total: int
    world: int
    model: WorkModel
    pieces: tuple[tuple[Piece, ...], ...]

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows that each rank owns."""
        return tuple(sum(p.end - p.begin for p in pieces) for pieces in self.pieces)

    @functools.cached_property
    def shared_documents(self) -> frozenset[int]:
        """Documents on more than one rank."""
        owners: dict[int, set[int]] = {}
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                owners.setdefault(piece.document, set()).add(rank)
        return frozenset(document for document, ranks in owners.items() if len(ranks) > 1)

    @functools.cached_property
    def shared_rows(self) -> tuple[int, ...]:
        """Rows of each rank whose keys travel: its first ones."""
        shared = self.shared_documents
        return tuple(sum(p.end - p.begin for p in pieces if p.document in shared) for pieces in self.pieces)

    @functools.cached_property
    def work(self) -> tuple[float, ...]:
        """Modelled work of each rank."""
        return tuple(sum(self.model.of_rows(p.begin, p.end) for p in pieces) for pieces in self.pieces)

    @property
    def imbalance(self) -> float:
        """The largest rank's modelled work over the mean; 1 if there is no work."""
        mean = sum(self.work) / self.world
        return max(self.work) / mean if mean > 0 else 1.0

    def length(self, document: int) -> int:
        """Rows of a document."""
        return self.cu_seqlens[document + 1] - self.cu_seqlens[document]


def make_plan(
    cu_seqlens: Sequence[int], world: int, *, total: int | None = None, model: WorkModel | None = None
) -> Plan:
    """Spreads packed documents over ranks so that their modelled work is equal.

    Args:
        cu_seqlens: offsets of the documents, ascending from 0, on the host.
        world: number of ranks.
        total: rows of the pack, where it has rows behind the last document; default ``cu_seqlens[-1]``.
        model: the work to balance; default MiniMax-M3 on an H200.

    Raises:
        TypeError: offsets that are no integers.
        ValueError: offsets that do not ascend from 0, or an impossible ``world`` or ``total``.

    Example:
        >>> from flashmsa.context_parallel import make_plan
        >>> plan = make_plan([0, 1000, 1010, 1020], 2)
        >>> plan.rows
        (510, 510)
        >>> [[(p.document, p.begin, p.end) for p in pieces] for pieces in plan.pieces]
        [[(0, 0, 250), (0, 750, 1000), (1, 0, 10)], [(0, 250, 750), (2, 0, 10)]]
    """
    try:
        offsets = tuple(operator.index(x) for x in cu_seqlens)
    except TypeError as error:
        raise TypeError(f"cu_seqlens must be a sequence of integers: {error}") from None
    if not offsets or offsets[0] != 0 or any(b < a for a, b in zip(offsets, offsets[1:], strict=False)):
        raise ValueError(f"cu_seqlens is {_short(offsets)}; it must ascend from 0")
    total = offsets[-1] if total is None else total
    if total < offsets[-1]:
        raise ValueError(f"total is {total}; it must be at least cu_seqlens[-1], {offsets[-1]}")
    if world < 1:
        raise ValueError(f"world is {world}; it must be at least 1")
    model = WorkModel() if model is None else model
    pieces = _balance([b - a for a, b in zip(offsets, offsets[1:], strict=False)], world, model)
    plan = Plan(offsets, total, world, model, tuple(map(tuple, pieces)))
    shared = plan.shared_documents
    ordered = [sorted(own, key=lambda p: (p.document not in shared, p.document, p.begin)) for own in pieces]
    return Plan(offsets, total, world, model, tuple(map(tuple, ordered)))


def _short(offsets: tuple[int, ...]) -> str:
    text = ", ".join(map(str, offsets[:8]))
    return f"[{text}, ...]" if len(offsets) > 8 else f"[{text}]"


def _balance(lengths: list[int], world: int, model: WorkModel) -> list[list[Piece]]:
    """The pieces of each rank, in no order."""
    work = [model.of_rows(0, n) for n in lengths]
    share = sum(work) / world
    pieces: list[list[Piece]] = [[] for _ in range(world)]
    loads = [(0.0, rank) for rank in range(world)]
    cut = []
    for document in sorted(range(len(lengths)), key=lambda d: (-work[d], d)):
        load, rank = loads[0]
        if lengths[document] == 0:
            continue
        if load + work[document] > share * (1 + _TOLERANCE):
            cut.append(document)
        else:
            pieces[rank].append(Piece(document, 0, lengths[document]))
            heapq.heapreplace(loads, (load + work[document], rank))
    for document, shares in _along_rooms(cut, work, loads, share):
        for rank, begin, end in _mirrored(lengths[document], shares, model):
            pieces[rank].append(Piece(document, begin, end))
    return pieces


def _along_rooms(
    documents: list[int], work: list[float], loads: list[tuple[float, int]], share: float
) -> list[tuple[int, list[tuple[int, float]]]]:
    """Lays documents one after the other along the ranks' rooms: for each the ranks it meets, with the work it brings.
    The rooms are scaled to what they must hold."""
    if not documents:
        return []
    needed, sliver = sum(work[d] for d in documents), share * _TOLERANCE
    room = {rank: max(share - load, 0.0) for load, rank in loads}
    worth = {rank: size for rank, size in room.items() if size > sliver}
    if sum(worth.values()) < needed * (1 - _TOLERANCE * 4):
        worth = {rank: size for rank, size in room.items() if size > 0.0}
    scale = needed / sum(worth.values())
    rooms = [(rank, size * scale) for rank, size in sorted(worth.items())]
    laid, at, left = [], 0, rooms[0][1]
    for document in documents:
        rest, shares = work[document], []
        while rest > 0.0:
            fits = at == len(rooms) - 1 or left >= rest - sliver
            taken = rest if fits else max(left, 0.0)
            if taken > 0.0:
                shares.append((rooms[at][0], taken))
            rest -= taken
            left -= taken
            if not fits:
                at += 1
                left += rooms[at][1]
        laid.append((document, shares))
    return laid


def _mirrored(n: int, shares: list[tuple[int, float]], model: WorkModel) -> list[tuple[int, int, int]]:
    """Cuts a document of n rows into (rank, begin, end): for each rank of `shares` the rows [x, y) and their mirror
    [n - y, n - x), with work in the proportion of the shares; the last one gets the middle."""
    result, x, done = [], 0, 0.0
    whole = sum(amount for _, amount in shares)
    for i, (rank, amount) in enumerate(shares):
        done += amount
        if i == len(shares) - 1:
            parts = [(x, n - x)]
        else:
            y = max(x, _where(n, done / whole * model.of_rows(0, n), model))
            parts = [(x, y), (n - y, n - x)]
            x = y
        result += [(rank, begin, end) for begin, end in parts if end > begin]
    return result


def _where(n: int, target: float, model: WorkModel) -> int:
    """The x up to n // 2 for which the first and the last x rows together come closest to the target."""

    def outer(x: int) -> float:
        return model.of_rows(0, x) + model.of_rows(n - x, n)

    low, high = 0, n // 2
    while low < high:
        middle = (low + high) // 2
        if outer(middle) < target:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low > 0 and target - outer(low - 1) < outer(low) - target else low

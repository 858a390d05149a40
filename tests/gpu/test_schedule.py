"""The reverse index and the work list, entry by entry, read from device memory as src/cuda/schedule.h lays it out."""

import numpy as np
import pytest
import torch
from fmsa import Call, Problem, documents, make_inputs

ITEM_EDGES = 1024


def align(n):
    return (n + 255) // 256 * 256


def segment_shift(p, slots, fragment_blocks):
    shift = 12
    while shift < 17 and (1 << shift) * max(slots, 1) < 128 * fragment_blocks:
        shift += 1
    while shift < 17 and (32 << shift) < p.total_q:
        shift += 1
    return shift


class Schedule:
    """The arrays of a schedule on the host."""

    def __init__(self, p, memory):
        hp = p.heads[2]
        longest = min(p.max_seqlen_k or p.total_k, p.total_k)
        fragment_blocks = -(-longest // p.block)
        self.slots = min(p.top_k, fragment_blocks)
        self.blocks = p.total_k // p.block + len(p.fragments)
        self.shift = segment_shift(p, self.slots, fragment_blocks)
        segments = -(-p.total_q // (1 << self.shift))
        edges, runs = hp * p.total_q * self.slots, hp * self.blocks * segments
        data, at = memory.cpu().numpy(), 0

        def take(count, dtype=np.int32):
            nonlocal at
            size = count * np.dtype(dtype).itemsize
            part = data[at : at + size].view(dtype)
            at += align(size)
            return part

        self.num_blocks = int(take(1)[0])
        names = ("block_k_begin", "block_k_end", "block_number", "block_q_begin", "block_q_end")
        for name in names:
            setattr(self, name, take(self.blocks))
        self.row_position, self.row_first_block = take(p.total_q), take(p.total_q)
        take(len(p.fragments)), take(len(p.fragments))
        self.list_begin = take(hp * self.blocks + 1, np.int64)
        self.edge_row, self.edge_slot = take(edges), take(edges)
        self.row_count = take(hp * p.total_q).reshape(hp, p.total_q)
        self.row_block = take(edges).reshape(hp, p.total_q, self.slots)
        self.num_items = int(take(1)[0])
        item = np.dtype([("begin", "i8"), ("count", "i4"), ("block", "i4"), ("head", "i4"), ("reserved", "i4")])
        self.items = take(edges // ITEM_EDGES + min(runs, edges), item)[: self.num_items]
        assert at == len(data), "the layout differs from src/cuda/layout.c"


def expected_geometry(p):
    blocks, position, first = [], np.full(p.total_q, -1), np.zeros(p.total_q, int)
    starts = {}
    for q0, q1, k0, k1 in p.fragments:
        ends = [f[3] for f in p.fragments if f[2] == k0]
        if k0 not in starts:
            starts[k0] = len(blocks)
            for b in range(-(-(max(ends) - k0) // p.block)):
                blocks.append((k0 + b * p.block, min(k0 + (b + 1) * p.block, max(ends)), b))
        if q1 > q0:
            position[q0:q1] = np.arange(q1 - q0) + (k1 - k0) - (q1 - q0)
            first[q0:q1] = starts[k0]
    return blocks, position, first


def verify(p, s, indices):
    blocks, position, first = expected_geometry(p)
    assert s.num_blocks == len(blocks)
    used = slice(0, len(blocks))
    assert np.array_equal(
        np.stack([s.block_k_begin, s.block_k_end, s.block_number], 1)[used], np.array(blocks).reshape(-1, 3)
    )
    assert (s.block_k_begin[len(blocks) :] == s.block_k_end[len(blocks) :]).all()
    assert (s.block_q_begin[len(blocks) :] == s.block_q_end[len(blocks) :]).all()
    assert np.array_equal(s.row_position, position)
    assert np.array_equal(s.row_first_block, first)
    assert (np.diff(s.block_q_begin[used]) >= 0).all() and (np.diff(s.block_q_end[used]) >= 0).all()
    hp = p.heads[2]
    lists = [[[] for _ in range(s.blocks)] for _ in range(hp)]
    for h in range(hp):
        for t in range(p.total_q):
            newest = position[t] // p.block if position[t] >= 0 else -1
            kept = sorted({int(b) for b in indices[h, t] if 0 <= b <= newest})
            assert s.row_count[h, t] == len(kept)
            assert s.row_block[h, t].tolist() == [b + first[t] for b in kept] + [-1] * (s.slots - len(kept))
            for slot, b in enumerate(kept):
                block = b + first[t]
                assert s.block_q_begin[block] <= t < s.block_q_end[block]
                lists[h][block].append((t, slot))
    at = 0
    for h in range(hp):
        for block in range(s.blocks):
            assert s.list_begin[h * s.blocks + block] == at
            got = list(zip(s.edge_row[at : at + len(lists[h][block])], s.edge_slot[at:]))
            assert got == lists[h][block], f"list of head {h}, block {block}"
            at += len(lists[h][block])
    assert s.list_begin[hp * s.blocks] == at
    verify_items(s, at)


def length_class(count):
    return sum(count <= bound for bound in (512, 256, 128, 64))


def verify_items(s, edges):
    covered = np.zeros(edges, int)
    previous = None
    for item in s.items:
        begin, count, block, head = (int(item[n]) for n in ("begin", "count", "block", "head"))
        assert 1 <= count <= ITEM_EDGES
        covered[begin : begin + count] += 1
        at = head * s.blocks + block
        assert s.list_begin[at] <= begin and begin + count <= s.list_begin[at + 1]
        segments = s.edge_row[begin : begin + count] >> s.shift
        assert segments.min() == segments.max()
        key = (segments[0], head, length_class(count), block, begin)
        assert previous is None or previous < key, "items are out of order"
        previous = key
    assert (covered == 1).all()


def build(p, indices):
    call = Call(p, {"block_indices": indices})
    call.schedule()
    return Schedule(p, call.buffers["schedule"].bytes)


def random_indices(p, seed, low=-2, extra=3):
    """Any order, duplicates, -1, blocks out of range and in the future."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    high = -(-p.total_k // p.block) + extra
    return torch.randint(low, high, (p.heads[2], p.total_q, p.top_k), generator=g, device="cuda", dtype=torch.int32)


CASES = {
    "documents": Problem((4, 2, 2, 1), documents([1, 127, 128, 129, 255, 256, 257, 900]), top_k=4),
    "empty documents": Problem((4, 2, 2, 1), documents([0, 0, 7, 0, 293]), top_k=4, block=64),
    "padded offsets": Problem((4, 2, 2, 1), documents([100, 200, 0, 0, 0]), top_k=4, block=64),
    "keys without queries": Problem(
        (2, 1, 1, 1), [(0, 0, 0, 500), (0, 60, 500, 700), (60, 60, 700, 900), (60, 100, 900, 1000)], top_k=3
    ),
    "gaps": Problem((2, 1, 2, 1), [(3, 10, 5, 12), (12, 300, 20, 400)], total_q=310, total_k=500, top_k=2),
    "context parallel": Problem(
        (4, 2, 2, 1), [(0, 90, 0, 190), (90, 200, 0, 1100), (200, 203, 1100, 1103)], top_k=5, block=64
    ),
    "growing shared keys": Problem(
        (2, 1, 1, 1), [(0, 50, 0, 50), (50, 80, 0, 70), (80, 90, 0, 300), (90, 100, 0, 110)], top_k=2, block=64
    ),
    "one token": Problem((1, 1, 1, 1), documents([1]), top_k=1),
    "wide k": Problem((2, 2, 2, 2), documents([3000]), top_k=128, block=64),
    "k not a power of two": Problem((2, 2, 2, 2), documents([1500]), top_k=37, block=64),
    "several segments": Problem((1, 1, 1, 1), documents([9000]), top_k=3, block=128),
    "more blocks than counters": Problem((2, 1, 2, 1), [(0, 40, 0, 9000 * 64 + 17)], top_k=20, block=64),
    "segments without rows": Problem((2, 1, 2, 1), documents([3000]), total_q=9000, total_k=3000, top_k=3),
    "keys alone": Problem((2, 1, 1, 1), [], total_q=5, total_k=300, top_k=2),
    "nothing": Problem((2, 1, 1, 1), [], total_q=5, total_k=0, top_k=2),
}


@pytest.mark.parametrize("name", CASES)
def test_caller_indices(name):
    p = CASES[name]
    indices = random_indices(p, seed=1)
    verify(p, build(p, indices), indices.cpu().numpy())


@pytest.mark.parametrize("name", CASES)
def test_selected_indices(name):
    p = CASES[name]
    indices = Call(p, make_inputs(p)).select()
    verify(p, build(p, indices), indices.cpu().numpy())


def test_sink():
    """Every token picks block 0 and its own: full items first, then the rest, none longer than an item."""
    p = Problem((2, 1, 2, 1), documents([9000]), top_k=2)
    newest = (torch.arange(9000, device="cuda") // 128).int()
    indices = torch.stack([torch.zeros_like(newest), newest], 1)[None].repeat(2, 1, 1)
    s = build(p, indices)
    verify(p, s, indices.cpu().numpy())
    assert (s.items["count"] == ITEM_EDGES).sum() >= 2 * (9000 // ITEM_EDGES - 3)


def test_strided_slice_of_a_bigger_buffer():
    p = Problem((2, 1, 2, 1), documents([700]), top_k=3, block=64)
    big = torch.full((2, 1000, 3), -7, dtype=torch.int32, device="cuda")
    big[:, :700] = random_indices(p, seed=2)
    verify(p, build(p, big[:, :700]), big[:, :700].cpu().numpy())


@pytest.mark.parametrize("count,length", [(12288, 16), (70000, 3)])
def test_many_documents(count, length):
    p = Problem((4, 1, 4, 1), documents([length] * count), top_k=4, max_seqlen_k=length)
    indices = torch.tensor([0, -1, -1, -1], dtype=torch.int32, device="cuda").expand(4, p.total_q, 4).contiguous()
    s = build(p, indices)
    cut = sum((t0 >> s.shift) != ((t0 + length - 1) >> s.shift) for t0 in range(0, p.total_q, length))
    assert s.num_blocks == count and s.num_items == 4 * (count + cut)
    assert (s.row_count == 1).all()
    assert np.array_equal(s.edge_row.reshape(4, -1), np.tile(np.arange(p.total_q), (4, 1)))
    assert np.array_equal(s.row_block[0, :, 0], np.arange(p.total_q) // length)
    assert s.items["count"].sum() == 4 * p.total_q


def test_every_entry_is_the_same_on_every_run():
    p = Problem((8, 2, 4, 1), documents([20000, 3000, 77]), top_k=16)
    indices = random_indices(p, seed=3)
    first = None
    for _ in range(20):
        call = Call(p, {"block_indices": indices})
        call.schedule()
        memory = call.buffers["schedule"].bytes.clone()
        assert first is None or torch.equal(first, memory)
        first = memory

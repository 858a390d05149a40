"""Selection: against the definition in fp64, and exactly where the scores are exact."""

import pytest
import torch
from fmsa import Call, Problem, documents, make_inputs
from reference import check_selection, proxy_scores, visibility

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def select(p, x):
    return Call(p, x).select()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("proxy_dim,block", [(128, 128), (64, 64), (128, 64), (64, 128)])
@pytest.mark.parametrize("heads", [(64, 4, 4, 1), (16, 2, 4, 4), (6, 1, 1, 1), (12, 4, 4, 2), (6, 3, 3, 1)])
def test_matches_definition(dtype, proxy_dim, block, heads):
    p = Problem(heads, documents([1, 127, 128, 129, 255, 256, 257, 1025]), dtype, 128, proxy_dim, block, top_k=3)
    x = make_inputs(p, seed=1)
    check_selection(p, x, select(p, x))


@pytest.mark.parametrize("top_k", [1, 2, 5, 12, 16, 33, 64, 128])
@pytest.mark.parametrize("local,init", [(1, 0), (0, 0), (2, 1), (3, 4), (200, 7)])
def test_forced_blocks(top_k, local, init):
    p = Problem(
        (4, 2, 2, 1), documents([2048, 300]), block=64, proxy_dim=64, top_k=top_k, local_blocks=local, init_blocks=init
    )
    x = make_inputs(p, seed=2)
    check_selection(p, x, select(p, x))


def expected_exact(p, x):
    """The definition's order applied to exact scores: ties go to the lower block."""
    visible, block = visibility(p, x["q_proxy"].device)
    scores = proxy_scores(p, x)
    hp = p.heads[2]
    result = torch.full((hp, p.total_q, p.top_k), -1, dtype=torch.int32)
    for h in range(hp):
        for t in range(p.total_q):
            count = int(visible[t].sum() + p.block - 1) // p.block
            best = [float(scores[h, t][visible[t] & (block[t] == b)].max()) for b in range(count)]
            take = min(count, p.top_k)
            local = min(take, p.local_blocks)
            init_end = min(p.init_blocks, count - local)
            forced = set(range(count - local, count)) | set(range(max(0, init_end - (take - local)), init_end))
            rest = sorted((b for b in range(count) if b not in forced), key=lambda b: (-best[b], b))
            chosen = sorted(forced | set(rest[: take - len(forced)]))
            result[h, t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return result


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_ties_go_to_the_lower_block(dtype):
    """Small whole numbers: every score is exact and most of them tie."""
    p = Problem((2, 1, 2, 1), [(0, 96, 0, 1700)], dtype, block=64, proxy_dim=64, top_k=9)
    g = torch.Generator(device="cuda").manual_seed(3)
    x = make_inputs(p)
    for name in ("q_proxy", "k_proxy"):
        keep = torch.rand(x[name].shape, generator=g, device="cuda") < 0.05
        x[name] = (torch.randint(-1, 2, x[name].shape, generator=g, device="cuda") * keep).to(dtype)
    assert torch.equal(select(p, x).cpu(), expected_exact(p, x))


def test_zero_queries():
    p = Problem((4, 1, 4, 1), documents([1500]), top_k=5, init_blocks=1)
    x = make_inputs(p)
    x["q_proxy"].zero_()
    got = select(p, x)
    newest = torch.arange(1500, device="cuda") // 128
    for rank in range(5):
        want = torch.where(newest >= 5, torch.tensor(rank, device="cuda") if rank < 4 else newest, rank)
        want = torch.where(rank <= newest, want, -1)
        assert torch.equal(got[..., rank].long(), want[None].expand(4, -1))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_near_ties(dtype):
    """4,096 blocks whose scores, 1 + j 2^-22, differ by less than 1e-6 and are exact in fp32."""
    blocks, p = 4096, Problem((1, 1, 1, 1), [(0, 8, 0, 4096 * 64)], dtype, block=64, proxy_dim=64, top_k=64)
    x = make_inputs(p)
    g = torch.Generator(device="cuda").manual_seed(4)
    j = torch.randint(0, 256, (blocks,), generator=g, device="cuda")
    x["q_proxy"].zero_()
    x["q_proxy"][..., 0] = 1
    x["q_proxy"][..., 1] = 2.0**-22
    x["k_proxy"].zero_()
    x["k_proxy"][::64, 0, 0] = 1
    x["k_proxy"][::64, 0, 1] = j.to(dtype)
    got = select(p, x)
    order = sorted(range(blocks - 1), key=lambda b: (-int(j[b]), b))
    want = torch.tensor(sorted([*order[:63], blocks - 1]), dtype=torch.int32)
    assert torch.equal(got[0, -1].cpu(), want)
    assert torch.equal(got[0].cpu(), want[None].expand(8, -1))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_special_values(dtype):
    """NaN ranks last, a block with some NaN keys counts by its others, -0 equals +0, infinities order as numbers."""
    p = Problem((1, 1, 1, 1), [(0, 1, 0, 10 * 64)], dtype, block=64, proxy_dim=64, top_k=4, local_blocks=0)
    x = make_inputs(p)
    x["q_proxy"].zero_()
    x["q_proxy"][..., 0] = 1
    x["k_proxy"].zero_()
    k = x["k_proxy"].view(10, 64, 64)
    k[:, :, 0] = -2
    k[0] = float("nan")  # all NaN: last
    k[1, :, 0] = float("-inf")
    k[2, ::2] = float("nan")  # others: -2
    k[3, :, 0] = -0.0
    k[4, :, 0] = 0.0
    k[5, 7, 0] = 3
    k[6, 9, 0] = float("inf")
    for top_k, want in ((1, [6]), (2, [5, 6]), (3, [3, 5, 6]), (4, [3, 4, 5, 6]), (5, [2, 3, 4, 5, 6])):
        p.top_k = top_k
        assert select(p, x)[0, 0].tolist() == want
    p.top_k = 9
    assert select(p, x)[0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    p.top_k = 10
    assert select(p, x)[0, 0].tolist() == list(range(10))


@pytest.mark.parametrize("block,keys", [(64, 600 * 64 + 5), (128, 2500 * 128 + 1), (64, 9000 * 64 + 17)])
def test_many_blocks(block, keys):
    """Each size of the top-k kernel, the last one with more blocks than its threads hold."""
    p = Problem(
        (2, 1, 2, 1), [(0, 40, 0, keys), (40, 72, keys, keys + 32)], block=block, proxy_dim=64, dim=64, top_k=20
    )
    x = make_inputs(p, seed=5)
    check_selection(p, x, select(p, x))


def test_documents_alone_and_packed_agree():
    lengths = [300, 1, 517, 64, 1200, 3]
    p = Problem((8, 2, 4, 2), documents(lengths), block=64, top_k=4)
    x = make_inputs(p, seed=6)
    packed = select(p, x)
    for (q0, q1, _, _), length in zip(p.fragments, lengths):
        alone = Problem(p.heads, documents([length]), block=64, top_k=4)
        part = {n: x[n][q0:q1].contiguous() for n in ("q_proxy", "k_proxy")}
        assert torch.equal(select(alone, part), packed[:, q0:q1])


def test_context_parallel_fragments_agree_with_the_whole():
    whole = Problem((8, 2, 4, 1), documents([1000]), block=64, top_k=4)
    x = make_inputs(whole, seed=7)
    want = select(whole, x)
    # A rank's first and last chunk: queries packed, keys of the whole document.
    p = Problem(whole.heads, [(0, 250, 0, 250), (250, 500, 0, 1000)], block=64, top_k=4)
    rows = torch.cat([torch.arange(250), torch.arange(750, 1000)]).cuda()
    got = select(p, {"q_proxy": x["q_proxy"][rows].contiguous(), "k_proxy": x["k_proxy"]})
    assert torch.equal(got, want[:, rows])


@pytest.mark.parametrize("limit", [0, 300_000])
def test_chunks_change_nothing(limit):
    p = Problem((8, 2, 4, 1), documents([700, 2000, 5]), block=64, top_k=6)
    x = make_inputs(p, seed=8)
    want = select(p, x)
    p.scratch_limit = 1_000_000
    assert torch.equal(select(p, x), want)
    p.scratch_limit, p.max_seqlen_k = limit, 2000
    assert torch.equal(select(p, x), want)


def test_rows_in_no_fragment_and_empty_documents():
    p = Problem(
        (4, 1, 4, 1),
        [(0, 0, 0, 0), (3, 10, 5, 12), (10, 10, 12, 12), (12, 300, 20, 400)],
        total_q=310,
        total_k=500,
        top_k=2,
    )
    x = make_inputs(p, seed=9)
    got = select(p, x)
    check_selection(p, x, got)
    for rows in (slice(0, 3), slice(10, 12), slice(300, 310)):
        assert (got[:, rows] == -1).all()


@pytest.mark.parametrize("count,length", [(12288, 16), (70000, 3)])
def test_many_documents(count, length):
    p = Problem((4, 1, 4, 1), documents([length] * count), top_k=4, max_seqlen_k=length)
    got = select(p, make_inputs(p))
    assert (got[..., 0] == 0).all() and (got[..., 1:] == -1).all()


def test_strided_views():
    p = Problem((8, 2, 4, 2), documents([600]), block=64, top_k=4)
    x = make_inputs(p, seed=10)
    want = select(p, x)
    fused = torch.full((600, 6 * 128 + 64), float("nan"), dtype=BF16, device="cuda")
    q, k = (fused[:, : 4 * 128].view(600, 4, 128), fused[:, 4 * 128 : 6 * 128].view(600, 2, 128))
    q.copy_(x["q_proxy"])
    k.copy_(x["k_proxy"])
    assert torch.equal(select(p, {"q_proxy": q, "k_proxy": k}), want)
    heads_first = {n: x[n].transpose(0, 1).contiguous().transpose(0, 1) for n in ("q_proxy", "k_proxy")}
    assert torch.equal(select(p, heads_first), want)

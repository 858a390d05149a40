"""Selection on Hopper: the same indices as the portable family, exactly where the scores are exact, and elsewhere but
for scores that differ by rounding."""

import pytest
import torch
from fmsa import PORTABLE, SELECT_FP8, Call, Problem, documents, make_inputs
from reference import proxy_scores, visibility

BF16, FP16 = torch.bfloat16, torch.float16

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="Hopper kernels")

PACKED = documents([1, 127, 128, 129, 255, 256, 257, 1025, 3, 2900, 64])
PARALLEL = [(0, 300, 0, 700), (300, 300, 0, 900), (310, 1500, 0, 4000), (1500, 1600, 4100, 6000)]
ONE = documents([4321])


def select(p, x, flags=0):
    p.flags = flags
    got = Call(p, x).select()
    p.flags = 0
    return got


def whole_numbers(p, seed):
    """Inputs whose scores are exact in fp32 whatever the order of summation, so that most of them tie."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = make_inputs(p)
    for name in ("q_proxy", "k_proxy"):
        keep = torch.rand(x[name].shape, generator=g, device="cuda") < 0.1
        values = torch.randint(-1, 2, x[name].shape, generator=g, device="cuda") * keep
        x[name] = torch.where(x[name].isnan(), x[name], values.to(p.dtype))
    return x


def best_scores(p, x):
    """[Hp, Tq, blocks]: the greatest score of each block in fp64, -inf where none is visible."""
    visible, block = visibility(p, "cuda")
    scores = proxy_scores(p, x)
    blocks = int(block.max()) + 1
    index = torch.where(visible, block, blocks)[None].expand_as(scores)
    best = torch.full((p.heads[2], p.total_q, blocks + 1), -torch.inf, dtype=scores.dtype, device="cuda")
    return best.scatter_reduce(2, index, scores, "amax")[..., :blocks]


def check_equal_but_for_rounding(p, x, got, want):
    """Where two selections differ, the blocks that only one of them has score the same within rounding."""
    assert torch.equal((got >= 0).sum(-1), (want >= 0).sum(-1))
    differ = (got != want).any(-1)
    assert differ.float().mean() < 0.01
    best = best_scores(p, x)
    for head, row in differ.nonzero().tolist():
        a, b = set(got[head, row].tolist()), set(want[head, row].tolist())
        scores = [float(best[head, row, i]) for i in a ^ b]
        assert max(scores) - min(scores) < 1e-5 * max(1.0, max(map(abs, scores)))


@pytest.mark.parametrize("fragments", [ONE, PACKED, PARALLEL], ids=["one", "packed", "parallel"])
@pytest.mark.parametrize(
    "heads", [(64, 4, 4, 1), (16, 2, 4, 4), (6, 1, 6, 1), (12, 4, 4, 2), (3, 3, 3, 1), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("dtype,proxy_dim", [(BF16, 128), (FP16, 64)])
@pytest.mark.parametrize(
    "top_k,local,init", [(16, 1, 0), (4, 1, 1), (16, 0, 0), (5, 2, 2), (1, 0, 1), (32, 1, 0), (3, 9, 9)]
)
def test_exact_scores(fragments, heads, dtype, proxy_dim, top_k, local, init):
    p = Problem(heads, fragments, dtype, proxy_dim=proxy_dim, top_k=top_k, local_blocks=local, init_blocks=init)
    x = whole_numbers(p, seed=top_k)
    assert torch.equal(select(p, x), select(p, x, PORTABLE))


@pytest.mark.parametrize("fragments", [ONE, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("dtype,proxy_dim", [(BF16, 128), (FP16, 128), (BF16, 64), (FP16, 64)])
@pytest.mark.parametrize("top_k,local", [(16, 1), (7, 0), (24, 1)])
def test_random_scores(fragments, dtype, proxy_dim, top_k, local):
    p = Problem((16, 2, 4, 1), fragments, dtype, proxy_dim=proxy_dim, top_k=top_k, local_blocks=local)
    x = make_inputs(p, seed=top_k, sharpness=2)
    check_equal_but_for_rounding(p, x, select(p, x), select(p, x, PORTABLE))


@pytest.mark.parametrize("top_k,local", [(16, 1), (6, 0), (30, 1)])
@pytest.mark.parametrize("sign", [1, -1])
def test_special_values(top_k, local, sign):
    """NaN, infinities and zeros of both signs among keys and queries; scores that are all negative."""
    p = Problem((4, 1, 4, 1), documents([5000, 1300]), top_k=top_k, local_blocks=local)
    x = whole_numbers(p, seed=11)
    g = torch.Generator(device="cuda").manual_seed(12)
    x["q_proxy"][..., 0], x["k_proxy"][..., 0] = sign * 8, -8
    for value in (float("nan"), float("inf"), -float("inf")):
        x["k_proxy"][torch.rand(p.total_k, generator=g, device="cuda") < 0.002] = value
    x["k_proxy"][640:1280] = float("nan")
    x["k_proxy"][1280:1536] = -0.0
    x["q_proxy"][torch.rand(p.total_q, 4, generator=g, device="cuda") < 0.01] = float("nan")
    assert torch.equal(select(p, x), select(p, x, PORTABLE))


@pytest.mark.parametrize("local", [0, 1])
def test_other_documents_do_not_leak(local):
    """NaN and infinity in every other document and behind the last change nothing."""
    lengths = [200, 700, 3000, 90, 1111]
    p = Problem((8, 2, 4, 2), documents(lengths), top_k=3, local_blocks=local, total_q=5200, total_k=5200)
    x = make_inputs(p, seed=13)
    want = select(p, x)
    for q0, q1, k0, k1 in p.fragments:
        y = {name: x[name].clone() for name in ("q_proxy", "k_proxy")}
        for value, name in ((float("inf"), "k_proxy"), (float("nan"), "q_proxy")):
            y[name][:k0] = y[name][k1:] = value
        assert torch.equal(select(p, y)[:, q0:q1], want[:, q0:q1])


@pytest.mark.parametrize("top_k", [16, 48])
def test_parts_and_chunks_change_nothing(top_k):
    """Few tiles are cut into parts, many scores into chunks; a low limit forbids the one and forces the other."""
    p = Problem((4, 1, 4, 1), [(0, 700, 0, 30000), (700, 1000, 30000, 42000)], top_k=top_k)
    x = make_inputs(p, seed=14)
    want = select(p, x)
    assert torch.equal(select(p, x), want)
    check_equal_but_for_rounding(p, x, want, select(p, x, PORTABLE))
    p.scratch_limit = 800_000
    assert torch.equal(select(p, x), want)


def test_strides():
    """Views of a fused tensor, heads outside rows, and one row or head for all (stride 0)."""
    p = Problem((8, 2, 4, 2), documents([3000]), top_k=4)
    x = make_inputs(p, seed=15)
    want = select(p, x)
    fused = torch.full((3000, 6 * 128 + 64), float("nan"), dtype=BF16, device="cuda")
    q, k = (fused[:, : 4 * 128].view(3000, 4, 128), fused[:, 4 * 128 : 6 * 128].view(3000, 2, 128))
    q.copy_(x["q_proxy"])
    k.copy_(x["k_proxy"])
    assert torch.equal(select(p, {"q_proxy": q, "k_proxy": k}), want)
    heads_first = {n: x[n].transpose(0, 1).contiguous().transpose(0, 1) for n in ("q_proxy", "k_proxy")}
    assert torch.equal(select(p, heads_first), want)
    for rows, heads in ((0, 128), (512, 0), (0, 0)):
        y = {"q_proxy": x["q_proxy"].as_strided((3000, 4, 128), (rows, heads, 1)), "k_proxy": x["k_proxy"]}
        assert torch.equal(select(p, y), select(p, y, PORTABLE))


def test_many_short_documents():
    p = Problem((4, 1, 4, 1), documents([3] * 70000), top_k=4, max_seqlen_k=3)
    got = select(p, make_inputs(p))
    assert (got[..., 0] == 0).all() and (got[..., 1:] == -1).all()


def test_fp8_exact_scores():
    """Whole numbers survive 8 bits: the same indices as in 16."""
    for fragments, top_k, local in ((ONE, 16, 1), (PACKED, 5, 0), (PARALLEL, 24, 1)):
        p = Problem((8, 2, 4, 2), fragments, top_k=top_k, local_blocks=local)
        x = whole_numbers(p, seed=16)
        x["q_proxy"][..., 0] = x["k_proxy"][..., 0] = 1
        assert torch.equal(select(p, x, SELECT_FP8), select(p, x))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_fp8_recall(dtype):
    p = Problem((4, 1, 4, 1), documents([9000]), dtype, top_k=16)
    x = make_inputs(p, seed=17)
    got, want = select(p, x, SELECT_FP8), select(p, x)
    agree = (got[..., :, None] == want[..., None, :]) & (want >= 0)[..., None, :]
    assert agree.sum() / (want >= 0).sum() > 0.9
    assert torch.equal((got >= 0).sum(-1), (want >= 0).sum(-1))


def test_fp8_special_values():
    p = Problem((4, 1, 4, 1), documents([4000]), top_k=6)
    x = make_inputs(p, seed=18)
    x["k_proxy"][256:512] = float("nan")
    x["k_proxy"][700] = float("inf")
    x["q_proxy"][3000:3100] = float("nan")
    x["q_proxy"][3200:3300] = 0
    got = select(p, x, SELECT_FP8)
    newest = torch.arange(4000, device="cuda") // 128
    assert torch.equal((got >= 0).sum(-1), (newest + 1).clamp(max=6)[None].expand(4, -1))
    assert (got.max(-1).values == newest).all()
    valid = got[..., 1:] >= 0
    assert ((got[..., 1:] > got[..., :-1]) | ~valid).all()


def test_same_on_every_run():
    p = Problem((16, 2, 4, 1), documents([9000]), top_k=16)
    x = make_inputs(p, seed=19)
    want = select(p, x)
    for _ in range(20):
        assert torch.equal(select(p, x), want)

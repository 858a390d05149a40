"""The Hopper forward against the definition in fp64, over head relations, dimensions, fragments and selections."""

import dataclasses

import pytest
import torch
from fmsa import FORWARD, KEY_OUTER, PORTABLE, QUERY_OUTER, WORKSPACE, Call, Failure, Problem, documents, make_inputs
from measure import selection
from reference import compare

BF16, FP16 = torch.bfloat16, torch.float16
M3 = (64, 4, 4, 1)
HEADS = [  # heads of a unit: 16, 4, 1, 6, 7, 4, 3, 1, 64, 12, 2
    M3,
    (16, 2, 4, 1),
    (8, 8, 8, 1),
    (6, 1, 1, 1),
    (28, 4, 4, 1),
    (32, 8, 2, 1),
    (12, 4, 4, 2),
    (1, 1, 1, 1),
    (64, 1, 1, 1),
    (24, 2, 2, 1),
    (4, 2, 2, 1),
]
FRAGMENTS = {
    "context parallel": [(0, 90, 0, 390), (90, 700, 0, 1100), (700, 703, 1100, 1103)],
    "growing shared keys": [(0, 150, 0, 150), (150, 280, 0, 270), (280, 290, 0, 700), (290, 300, 0, 710)],
    "keys without queries": [(0, 0, 0, 500), (0, 60, 500, 700), (60, 60, 700, 900), (60, 100, 900, 1000)],
    "gaps": [(3, 10, 5, 12), (12, 600, 20, 700)],
    "short documents": documents([16] * 40 + [3] * 30 + [1] * 5),
    "empty documents": documents([0, 0, 7, 0, 293]),
    "padded offsets": documents([100, 200, 0, 0, 0]),
    "one token": documents([1]),
    "no fragments": [],
}


def forward(p, x):
    """Runs what comes before the forward, and the forward. Returns copies of out and lse, and the call."""
    call = Call(p, x)
    if not p.dense:
        if "block_indices" not in x:
            call.select()
        call.schedule()
    call.forward()
    return call.outputs["out"].clone(), call.outputs["lse"].clone(), call


def indices_of(call):
    return None if call.p.dense else {**call.outputs, **call.inputs}["block_indices"]


def check(p, x):
    out, lse, call = forward(p, x)
    compare(p, x, indices_of(call), {"out": out, "lse": lse})
    return out, lse


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads, dtype, dim, dense):
    p = Problem(heads, documents([900, 1, 130, 257, 3]), dtype, dim, top_k=3, dense=dense)
    check(p, make_inputs(p, seed=1))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("heads", [M3, (16, 2, 4, 1), (28, 4, 4, 1)])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments(name, heads, dense):
    fragments = FRAGMENTS[name]
    p = Problem(heads, fragments, top_k=3, dense=dense)
    p.total_q += 9
    p.total_k += 70
    out, lse = check(p, make_inputs(p, seed=2))
    used = torch.zeros(p.total_q, dtype=torch.bool, device="cuda")
    for q0, q1, _, _ in fragments:
        used[q0:q1] = True
    assert (out[~used] == 0).all() and (lse[:, ~used] == float("-inf")).all()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("factor", [3, 50])
def test_sharp_softmax(factor, dtype, dense):
    """The reference of the softmax must be raised now and then, in both kernels."""
    p = Problem(M3, documents([1200]), dtype, top_k=5, dense=dense)
    x = make_inputs(p, seed=3)
    x["q"] *= factor
    check(p, x)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("offset", [-120.0, 600.0])
def test_lse_far_from_zero(offset, dtype):
    p = Problem((16, 1, 1, 1), documents([1500]), dtype, top_k=4)
    x = make_inputs(p, seed=4)
    x["q"][..., 0] = 8.0
    x["k"][..., 0] = offset * 128**0.5 / 8
    _, lse = check(p, x)
    assert (lse.mean() - offset).abs() < 20


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_partial_result_before_the_first_popular_block(dtype):
    """Six of a tile's eight tokens choose block 2, its first step. The others have seen nothing when a partial result
    is merged behind it, with an LSE of about -28 (base 2); then blocks 1 and 0 come, chosen by all, whose weights
    would be 0 in fp16 beside a reference of 0. Nobody chooses the local block, and no three tokens another one."""
    p = Problem((16, 1, 1, 1), [(0, 512, 0, 3072)], dtype, top_k=7)
    x = make_inputs(p, seed=14)
    x["q"][..., 0] = 8.0
    x["k"][..., 0] = -25 * 128**0.5 / 8
    token = torch.arange(512, dtype=torch.int32, device="cuda")[:, None] % 8
    popular = torch.tensor([[0, 1, 2]], dtype=torch.int32, device="cuda").repeat(512, 1)
    popular[:, 2:][token >= 6] = -1
    rare = 3 + (2 * token + torch.arange(4, dtype=torch.int32, device="cuda")) % 16
    x["block_indices"] = torch.cat((popular, rare), 1)[None].contiguous()
    check(p, x)


def test_tiles_whose_second_half_has_no_tokens():
    """Of each block's tokens, 1 to 4 are left for the last tile of eight, so that its second half is empty, where
    earlier tiles left cells of other edges. Tokens stand so far apart that no block is popular."""
    p = Problem(M3, [(0, 512, 0, 3072)], top_k=20)
    x = make_inputs(p, seed=15)
    block = torch.arange(20, dtype=torch.int32, device="cuda")
    chosen_by = 8 * block + 1 + block % 4
    token = torch.arange(512, dtype=torch.int32, device="cuda")[:, None]
    chosen = token * chosen_by % 512 < chosen_by
    assert torch.equal(chosen.sum(0), chosen_by.long()) and chosen.view(64, 8, 20).sum(1).max() < 5
    x["block_indices"] = torch.where(chosen, block, -1).int().repeat(4, 1, 1)
    out, lse, call = forward(p, x)
    compare(p, x, x["block_indices"], {"out": out, "lse": lse})
    for _ in range(3):
        call.forward()
        assert torch.equal(out, call.outputs["out"]) and torch.equal(lse, call.outputs["lse"])


@pytest.mark.parametrize("dense", [False, True])
def test_nothing_leaks(dense):
    """Infinite and NaN values of other documents, of later blocks and behind the keys touch nothing."""
    p = Problem(M3, documents([300, 517, 64]), top_k=3, dense=dense)
    x = make_inputs(p, seed=5)
    first, first_lse, _ = forward(p, x)
    changed = {n: v.clone() for n, v in x.items()}
    changed["v"][300:817] = float("inf")
    changed["k"][300:817] = float("nan")
    changed["v"][256:300] = float("nan")
    second, second_lse, _ = forward(p, changed)
    for rows in (slice(0, 256), slice(817, 881)):
        assert torch.equal(first[rows], second[rows]) and torch.equal(first_lse[:, rows], second_lse[:, rows])


@pytest.mark.parametrize("kind", ["recent", "agree32", "trained"])
@pytest.mark.parametrize("heads", [M3, (16, 2, 4, 1), (12, 4, 4, 2)])
def test_selections(heads, kind):
    """From fully agreeing neighbours to random ones: the split between the kernels changes, the result does not."""
    p = Problem(heads, documents([2500]), top_k=8)
    x = make_inputs(p, seed=6)
    x["block_indices"] = selection(kind, heads[2], 2500, 8)
    check(p, x)


@pytest.mark.parametrize("flag", [KEY_OUTER, QUERY_OUTER])
@pytest.mark.parametrize("kind", ["random", "agree32", "trained"])
@pytest.mark.parametrize("heads", [M3, (16, 2, 4, 1), (12, 4, 4, 2), (1, 1, 1, 1)])
def test_one_way_alone(heads, kind, flag):
    """The query-outer way needs more room, the key-outer way has no popular block but each token's own."""
    p = Problem(heads, documents([700, 3, 341]), top_k=4, flags=flag)
    x = make_inputs(p, seed=19)
    x["block_indices"] = torch.cat([selection(kind, heads[2], n, 4) for n in (700, 3, 341)], 1)
    check(p, x)


def test_caller_indices_in_any_order():
    """Unsorted, -1 in the middle, empty rows, blocks that do not exist, duplicates, rows without their own block."""
    p = Problem((16, 2, 4, 1), documents([1700, 520]), top_k=6)
    x = make_inputs(p, seed=7)
    g = torch.Generator(device="cuda").manual_seed(8)
    indices = torch.randint(-2, 15, (4, 2220, 6), generator=g, device="cuda", dtype=torch.int32)
    indices[1, 5:50] = -1
    out, lse = check(p, {**x, "block_indices": indices})
    assert (lse[4:8, 5:50] == float("-inf")).all() and (out[5:50, 4:8] == 0).all()
    shuffled = indices[..., torch.randperm(6)].contiguous()
    again, again_lse = check(p, {**x, "block_indices": shuffled})
    assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("heads", [M3, (28, 4, 4, 1)])
def test_k_of_all_blocks_equals_dense(heads, dtype):
    """Bit for bit, where a selection has the heads of a key head: the same tiles walk the same lists."""
    p = Problem(heads, documents([1030, 77, 512]), dtype, top_k=9)
    x = make_inputs(p, seed=9)
    sparse, sparse_lse = check(p, x)
    p.dense = True
    dense, dense_lse = check(p, x)
    assert torch.equal(sparse, dense) and torch.equal(sparse_lse, dense_lse)


def test_strided_views():
    p = Problem((16, 2, 4, 1), documents([700]), top_k=3)
    x = make_inputs(p, seed=10)
    fused = torch.empty(700, 16 + 2 + 2 + 4 + 1, 128, dtype=BF16, device="cuda")
    views = dict(zip(("q", "k", "v", "q_proxy", "k_proxy"), fused.split((16, 2, 2, 4, 1), 1), strict=True))
    for name, view in views.items():
        view.copy_(x[name])
    plain, lse = check(p, x)
    strided, strided_lse = check(p, {**x, **views})
    assert torch.equal(plain, strided) and torch.equal(lse, strided_lse)
    transposed = {n: x[n].transpose(0, 1).contiguous().transpose(0, 1) for n in ("q", "k", "v")}
    again, _ = check(p, {**x, **transposed})
    assert torch.equal(plain, again)


def forward_bytes(p, x, flags=0):
    """Workspace of the forward. Both families fill a limit in steps of their own, so equal sizes with and without the
    flag PORTABLE tell that the portable kernels are chosen."""
    return len(Call(dataclasses.replace(p, flags=flags), x).prepare(FORWARD, [])[2].bytes)


@pytest.mark.parametrize("heads", [M3, (12, 4, 4, 2)])
def test_scratch_limit(heads):
    """The least scratch that the Hopper kernels accept: many chunks, and tiles cut by them. The portable kernels, which
    need less, take over below it, down to a limit that is too low for them too."""
    p = Problem(heads, documents([3000, 1000, 70]), top_k=4)
    x = make_inputs(p, seed=11)
    x["block_indices"] = Call(p, x).select().clone()
    p.scratch_limit = 1 << 30
    least = {}  # accepted limit of each family
    while True:
        try:
            size = forward_bytes(p, x)
            family = "portable" if size == forward_bytes(p, x, PORTABLE) else "Hopper"
        except Failure as failure:
            assert failure.status == WORKSPACE and "scratch_limit" in str(failure)
            break
        assert size <= p.scratch_limit
        least[family] = p.scratch_limit
        p.scratch_limit = p.scratch_limit * 3 // 4
    assert list(least) == ["Hopper", "portable"] and least["Hopper"] <= 1 << 26
    for p.scratch_limit in least.values():
        check(p, x)


def test_many_short_documents_of_lone_heads():
    """A head a unit: tiles of 128 tokens, of which a document fills few, and k as great as the keys allow. The Hopper
    kernels would need more than 6 GB even for 128 rows; the portable ones take over."""
    p = Problem((16, 16, 16, 1), documents([5] * 128), total_k=12800, top_k=100)
    x = make_inputs(p, seed=16)
    assert forward_bytes(p, x) == forward_bytes(p, x, PORTABLE) < 1 << 29
    check(p, x)


@pytest.mark.parametrize("heads,kind", [(M3, "trained"), (M3, "random"), ((16, 2, 4, 1), "trained")])
def test_long_against_portable(heads, kind):
    """Many blocks, many items, repeated: equal bits each time, and the portable kernels' values within rounding."""
    tokens = 20000
    p = Problem(heads, documents([tokens - 3001, 3001]), top_k=16)
    x = make_inputs(p, seed=12)
    if kind != "random":
        x["block_indices"] = selection(kind, heads[2], tokens, 16)
        x["block_indices"][:, tokens - 3001 :] = selection(kind, heads[2], 3001, 16)
    out, lse, call = forward(p, x)
    for _ in range(3):
        call.forward()
        assert torch.equal(out, call.outputs["out"]) and torch.equal(lse, call.outputs["lse"])
    p.flags = PORTABLE
    call.forward()
    difference = (out.float() - call.outputs["out"].float()).norm() / out.float().norm()
    assert difference < 4e-3 and (lse - call.outputs["lse"]).abs().max() < 2e-3


@pytest.mark.parametrize("heads", [M3, (4, 2, 2, 1), (8, 8, 8, 1)])
def test_documents_of_more_blocks_than_the_table_holds(heads):
    """The split passes over a document's blocks in windows of 1,024 or fewer: neighbours share blocks in each."""
    lengths, top_k = [1, 128 * 2100 + 77], 12
    p = Problem(heads, documents(lengths), top_k=top_k)
    x = make_inputs(p, seed=18)
    position = torch.arange(lengths[1], device="cuda")
    newest, group = position // 128, position // 32
    shared = torch.stack([newest * i // (top_k - 3) for i in range(top_k - 3)], 1)
    alone = torch.stack([(position * 7919 + 31 * i) % (newest + 1) for i in range(2)], 1)
    chosen = torch.cat([shared, alone, (group * 104729 % (newest + 1))[:, None]], 1).int()
    x["block_indices"] = torch.full((heads[2], p.total_q, top_k), -1, dtype=torch.int32, device="cuda")
    x["block_indices"][:, 0, 0] = 0
    x["block_indices"][:, 1:] = chosen
    out, lse, call = forward(p, x)
    p.flags = PORTABLE
    call.forward()
    difference = (out.float() - call.outputs["out"].float()).norm() / out.float().norm()
    assert difference < 4e-3 and (lse - call.outputs["lse"]).abs().max() < 2e-3


@pytest.mark.parametrize("dense", [False, True])
def test_graph_replayed_with_other_documents(dense):
    p = Problem(M3, documents([600, 424]), top_k=3, dense=dense)
    x = make_inputs(p, seed=13)
    x["block_indices"] = selection("trained", 4, 1024, 3)
    call = Call(p, x)
    operations = [FORWARD] if dense else [1, FORWARD]
    prepared = [call.prepare(o, ["out", "lse"] if o == FORWARD else []) for o in operations]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for operation, ready in zip(operations, prepared, strict=True):
            call.enqueue(operation, ready)
    for lengths in ([600, 424], [130, 894]):
        p.fragments = documents(lengths)
        for array, column in zip(p.arrays, zip(*p.fragments, strict=True), strict=True):
            array.copy_(torch.tensor(column))
        graph.replay()
        torch.cuda.synchronize()
        outputs = {n: call.outputs[n] for n in ("out", "lse")}
        compare(p, x, None if dense else x["block_indices"], outputs)

"""The Hopper proxy loss: 16-bit types and blocks of 128, over heads, dimensions, fragments, chunks and groups; alone,
and from the teacher that the Hopper backward leaves."""

import pytest
import torch
from fmsa import (
    BACKWARD_WITH_PROXY,
    DETERMINISTIC,
    FORWARD,
    FP32_KV_GRADS,
    PORTABLE,
    PROXY_LOSS,
    Call,
    Failure,
    Problem,
    documents,
    make_inputs,
)
from reference import compare

BF16, FP16 = torch.bfloat16, torch.float16
RAGGED = [1, 127, 128, 129, 255, 256, 257]
PROXY = ("dq_proxy", "dk_proxy", "kl")
HEADS = [
    (64, 4, 4, 1),
    (16, 2, 4, 4),
    (8, 8, 8, 1),
    (6, 1, 1, 1),
    (28, 4, 4, 1),
    (32, 8, 2, 1),
    (12, 4, 4, 2),
    (1, 1, 1, 1),
]


def ready(p, x):
    """A call whose forward pass is done."""
    call = Call(p, x)
    if not p.dense:
        if "block_indices" not in x:
            call.select()
        call.schedule()
    call.forward()
    return call


def both(p, x):
    """The proxy's outputs of the loss alone, then of the backward pass, each compared with the definition."""
    call = ready(p, x)
    indices = None if p.dense else {**call.outputs, **call.inputs}["block_indices"]
    results = []
    for run in (call.proxy_loss, call.backward_with_proxy):
        run()
        compare(p, x, indices, {name: call.outputs[name] for name in PROXY})
        results.append({name: call.outputs[name].clone() for name in PROXY})
    return results


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads, dtype, dense):
    p = Problem(heads, documents([700, 1, 130, 257]), dtype, top_k=3, dense=dense)
    both(p, make_inputs(p, seed=31))


@pytest.mark.parametrize("flags", [0, DETERMINISTIC, FP32_KV_GRADS, DETERMINISTIC | FP32_KV_GRADS])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dim,proxy_dim", [(64, 64), (64, 128), (128, 64)])
def test_dimensions(dim, proxy_dim, dtype, dense, flags):
    p = Problem((16, 2, 4, 2), documents([*RAGGED, 600]), dtype, dim, proxy_dim, top_k=3, dense=dense, flags=flags)
    both(p, make_inputs(p, seed=32))


@pytest.mark.parametrize("sharpness", [3, 8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_sharp_softmax(sharpness, dtype):
    p = Problem((16, 4, 4, 2), documents([900, 33]), dtype, top_k=5)
    both(p, make_inputs(p, seed=33, sharpness=sharpness))


@pytest.mark.parametrize("dense", [False, True])
def test_fragments_and_rows_outside(dense):
    """Chunks of one document, keys without queries, gaps; what lies outside is NaN, and gets 0."""
    fragments = [
        (3, 90, 0, 190),
        (90, 200, 0, 1100),
        (200, 203, 1107, 1110),
        (210, 210, 1110, 1400),
        (210, 500, 1450, 1800),
    ]
    p = Problem((16, 2, 4, 1), fragments, BF16, top_k=3, dense=dense, total_q=520, total_k=1900)
    for result in both(p, make_inputs(p, seed=34)):
        assert (result["dq_proxy"][[*range(3), *range(203, 210), *range(500, 520)]] == 0).all()
        assert (result["dk_proxy"][1110:1450] == 0).all() and (result["dk_proxy"][1800:] == 0).all()


def test_infinite_keys_behind_the_end():
    """A block that ends inside a tile: the next document's keys have no effect."""
    p = Problem((16, 2, 4, 1), documents([200, 300]), BF16, top_k=4, flags=DETERMINISTIC)
    x = make_inputs(p, seed=35)
    clean = both(p, x)
    for name in ("q", "k", "v", "q_proxy", "k_proxy", "dout"):
        x[name] = x[name].clone()
        x[name][200:] = float("inf")
    call = ready(p, x)
    for expected, run in zip(clean, (call.proxy_loss, call.backward_with_proxy)):
        run()
        assert torch.equal(call.outputs["dq_proxy"][:200], expected["dq_proxy"][:200])
        assert torch.equal(call.outputs["dk_proxy"][:200], expected["dk_proxy"][:200])


@pytest.mark.parametrize("dense", [False, True])
def test_keys_of_any_size(dense):
    """Queries a power of two smaller and keys as much larger, or the other way: dq_proxy follows the keys, also where
    documents differ."""
    p = Problem((16, 2, 4, 1), documents([700, 600]), BF16, top_k=3, dense=dense)
    x = make_inputs(p, seed=44)
    factor = torch.full((1300, 1, 1), 2.0**-14, device="cuda", dtype=BF16)
    factor[:700] = 2.0**20
    scaled = {**x, "q_proxy": x["q_proxy"] / factor, "k_proxy": x["k_proxy"] * factor}
    for usual, result in zip(both(p, x), both(p, scaled)):
        for rows in (slice(700), slice(700, 1300)):
            expected = usual["dq_proxy"][rows].double() * factor[rows].double()
            assert (result["dq_proxy"][rows].double() - expected).norm() <= 2e-3 * expected.norm()


def test_sink():
    """Every token attends to block 0: its list is cut, and its gradient is the sum."""
    p = Problem((16, 2, 4, 1), documents([6000]), BF16, top_k=2, flags=DETERMINISTIC)
    newest = (torch.arange(6000, device="cuda") // 128).int()
    indices = torch.stack([torch.zeros_like(newest), newest], 1)[None].repeat(4, 1, 1)
    indices[:, :128, 1] = -1
    both(p, {**make_inputs(p, seed=36), "block_indices": indices})


def test_empty_rows_and_any_order():
    p = Problem((16, 2, 4, 1), documents([900, 120]), BF16, top_k=6, flags=DETERMINISTIC)
    g = torch.Generator(device="cuda").manual_seed(37)
    indices = torch.randint(-2, 9, (4, 1020, 6), generator=g, device="cuda", dtype=torch.int32)
    indices[1, 5:50] = -1
    x = make_inputs(p, seed=37)
    first = both(p, {**x, "block_indices": indices})
    assert (first[0]["dq_proxy"][5:50, 1] == 0).all()
    second = both(p, {**x, "block_indices": indices[..., torch.randperm(6)].contiguous()})
    for a, b in zip(first, second):
        for name in PROXY:
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("dense", [False, True])
def test_repeats_are_equal(dense):
    p = Problem((16, 2, 4, 1), documents([5000, 300]), BF16, top_k=5, dense=dense, flags=DETERMINISTIC)
    call = ready(p, make_inputs(p, seed=38))
    for run in (call.proxy_loss, call.backward_with_proxy):
        run()
        first = {name: call.outputs[name].clone() for name in PROXY}
        for _ in range(20):
            run()
            for name in PROXY:
                assert torch.equal(call.outputs[name], first[name]), name


@pytest.mark.parametrize("dense", [False, True])
def test_little_scratch(dense):
    """Down to the least that the operation accepts: many chunks, in dense mode many groups."""
    p = Problem((16, 2, 4, 1), documents([3000, 1000]), BF16, top_k=4, dense=dense)
    x = make_inputs(p, seed=39)
    call = ready(p, x)
    indices = call.outputs.get("block_indices")
    size = len(call.prepare(PROXY_LOSS, PROXY)[2].bytes)
    sizes = []
    while True:
        p.scratch_limit = size = size * 3 // 4
        try:
            call.proxy_loss()
        except Failure:
            break
        sizes.append(len(call.buffers[f"workspace of {PROXY_LOSS}"].bytes))
        assert sizes[-1] <= size
        compare(p, x, indices, {name: call.outputs[name] for name in PROXY})
    assert len(set(sizes)) >= 3, sizes


@pytest.mark.parametrize("outputs", [["kl"], ["dk_proxy"], ["kl", "dk_proxy"]])
@pytest.mark.parametrize("dense", [False, True])
def test_chunks_without_dq_proxy(dense, outputs):
    """Nothing then stands between a chunk's gradients and the next chunk's shares, whose memory lies elsewhere if the
    chunk is smaller."""
    p = Problem((16, 2, 4, 1), documents([5000, 1700]), BF16, top_k=4, dense=dense)
    call = ready(p, make_inputs(p, seed=44))
    call.proxy_loss()
    want = {name: call.outputs[name].double().clone() for name in outputs}
    for operation, wanted in ((PROXY_LOSS, outputs), (BACKWARD_WITH_PROXY, [*outputs, "dk"])):
        p.scratch_limit = 0
        size = len(call.prepare(operation, wanted)[2].bytes)
        for part in (3 / 4, 9 / 16):
            p.scratch_limit = int(size * part)
            for _ in range(4):
                call.run(operation, wanted)
                for name, x in want.items():
                    assert (call.outputs[name].double() - x).norm() < 1e-3 * x.norm(), (operation, part, name)


def test_agrees_with_portable():
    """At a size that the definition cannot hold at once."""
    p = Problem((16, 2, 4, 1), documents([20000]), BF16, top_k=16)
    call = ready(p, make_inputs(p, seed=40))
    call.proxy_loss()
    hopper = {name: call.outputs[name].clone() for name in PROXY}
    p.flags = PORTABLE
    call.proxy_loss()
    for name in PROXY:
        difference = (hopper[name].double() - call.outputs[name].double()).norm() / call.outputs[name].double().norm()
        assert difference < 6e-3, (name, difference)


def test_views_and_missing_outputs():
    """A fused tensor, and every set of wanted outputs."""
    p = Problem((8, 2, 4, 1), documents([700]), BF16, 64, 64, top_k=3)
    x = make_inputs(p, seed=41)
    fused = torch.empty(700, 8 + 2 + 2 + 4 + 1, 64, dtype=BF16, device="cuda")
    views = dict(zip(("q", "k", "v", "q_proxy", "k_proxy"), fused.split((8, 2, 2, 4, 1), 1)))
    for name, view in views.items():
        view.copy_(x[name])
    x = {**x, **views}
    both(p, x)
    call = ready(p, x)
    for outputs in (["kl"], ["dq_proxy"], ["dk_proxy"], ["kl", "dq_proxy"], ["dq_proxy", "dk_proxy"]):
        for run in (call.proxy_loss, call.backward_with_proxy):
            for name in PROXY:
                call.outputs.pop(name, None)
            run(outputs)
            compare(p, x, call.outputs["block_indices"], {name: call.outputs[name] for name in outputs})


def test_loss_scale_of_fp16():
    """Gradients of dL/dKL = 256 and 65,536 differ by that factor: none underflows on the way."""
    p = Problem((16, 2, 4, 1), documents([900]), FP16, top_k=3)
    x = make_inputs(p, seed=42)
    results = []
    for scale in (256.0, 65536.0):
        x["grad_kl"][:] = scale
        results.append(both(p, x)[0])
    for name in ("dq_proxy", "dk_proxy"):
        small, large = (r[name].double() for r in results)
        assert (small * 256 - large).norm() <= 2e-3 * large.norm(), name


def test_graph_replays_with_other_fragments():
    p = Problem((16, 2, 4, 1), documents([700, 300]), BF16, top_k=3)
    x = make_inputs(p, seed=43)
    call = ready(p, x)
    prepared = call.prepare(PROXY_LOSS, PROXY)
    forward = call.prepare(FORWARD, ["out", "lse"])
    call.enqueue(FORWARD, forward)
    call.enqueue(PROXY_LOSS, prepared)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.enqueue(PROXY_LOSS, prepared)
    for array, values in zip(p.arrays, zip(*documents([450, 550]))):
        array.copy_(torch.tensor(values, dtype=torch.int32))
    p.fragments = documents([450, 550])
    call.select()
    call.schedule()
    call.enqueue(FORWARD, forward)
    graph.replay()
    torch.cuda.synchronize()
    compare(p, x, call.outputs["block_indices"], {name: call.outputs[name] for name in PROXY})


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("fragments", [[], [(2, 2, 0, 0)]])
def test_rows_without_any_key(fragments, dense):
    """No key in the whole call: gradients and the loss are 0, whichever outputs are asked for."""
    p = Problem((16, 2, 4, 1), fragments, BF16, top_k=3, dense=dense, total_q=5, total_k=0)
    call = ready(p, make_inputs(p, seed=40))
    for run, outputs in (
        (call.proxy_loss, PROXY),
        (call.backward, ("dq", "dk", "dv")),
        (call.backward_with_proxy, ("dq", "dk", "dv", *PROXY)),
        (call.backward_with_proxy, PROXY),
        (call.backward_with_proxy, ("dq", "kl")),
    ):
        run(outputs)
        for name in outputs:
            assert (call.outputs[name] == 0).all(), f"{name} of {outputs}"

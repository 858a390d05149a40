"""The Hopper backward: 16-bit types and blocks of 128, over heads, dimensions, fragments, chunks, long and hot lists;
alone, and with the proxy loss that takes its teacher."""

import re

import pytest
import torch
from fmsa import (
    BACKWARD,
    BACKWARD_WITH_PROXY,
    DETERMINISTIC,
    FP32_KV_GRADS,
    PORTABLE,
    Call,
    Failure,
    Problem,
    documents,
    make_inputs,
)
from reference import compare

BF16, FP16 = torch.bfloat16, torch.float16
MAIN = ("dq", "dk", "dv")
PROXY = ("dq_proxy", "dk_proxy", "kl")
HEADS = [
    (64, 4, 4, 1),
    (16, 2, 4, 1),
    (16, 2, 4, 4),
    (8, 8, 8, 1),
    (6, 1, 1, 1),
    (28, 4, 4, 1),
    (32, 8, 2, 1),
    (12, 4, 4, 2),
    (1, 1, 1, 1),
    (64, 1, 1, 1),
    (96, 2, 2, 1),
    (12, 1, 1, 1),
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


def check(p, x, call, names):
    indices = None if p.dense else {**call.outputs, **call.inputs}["block_indices"]
    compare(p, x, indices, {name: call.outputs[name] for name in names})


def results(call, names):
    return {name: call.outputs[name].clone() for name in names}


def both(p, x):
    """The backward pass alone, then with the proxy loss, each compared with the definition."""
    call = ready(p, x)
    call.backward()
    check(p, x, call, MAIN)
    call.backward_with_proxy()
    check(p, x, call, MAIN + PROXY)
    return call


@pytest.mark.parametrize("flags", [0, DETERMINISTIC])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads, dim, dtype, dense, flags):
    p = Problem(heads, documents([700, 1, 130, 257]), dtype, dim, top_k=3, dense=dense, flags=flags)
    both(p, make_inputs(p, seed=41))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("sharpness", [3, 8, 2500])
@pytest.mark.parametrize("flags", [0, DETERMINISTIC, FP32_KV_GRADS])
def test_sharp_softmax_and_flags(flags, sharpness, dtype):
    p = Problem((16, 4, 4, 2), documents([900, 33]), dtype, top_k=5, flags=flags)
    x = make_inputs(p, seed=42, sharpness=sharpness)
    if sharpness < 100:
        both(p, x)
    else:
        call = ready(p, x)
        call.backward()
        check(p, x, call, MAIN)


FRAGMENTS = {
    "context parallel": [(0, 90, 0, 190), (90, 300, 0, 1100), (300, 303, 1100, 1103)],
    "growing shared keys": [(0, 50, 0, 50), (50, 180, 0, 170), (180, 190, 0, 600), (190, 200, 0, 210)],
    "keys without queries": [(0, 0, 0, 500), (0, 60, 500, 700), (60, 60, 700, 900), (60, 100, 900, 1300)],
    "gaps": [(3, 10, 5, 12), (12, 600, 20, 700), (650, 700, 20, 900)],
    "empty documents": documents([0, 0, 7, 0, 293]),
    "padded offsets": documents([100, 200, 0, 0, 0]),
    "ragged": documents([1, 127, 128, 129, 255, 256, 257]),
    "one token": documents([1]),
    "many": documents([3] * 700),
    "no fragments": [],
}


@pytest.mark.parametrize("flags", [0, DETERMINISTIC])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments(name, dense, flags):
    fragments = FRAGMENTS[name]
    total_q, total_k = (max([f[i] for f in fragments], default=0) for i in (1, 3))
    p = Problem(
        (32, 2, 4, 1), fragments, BF16, top_k=3, dense=dense, flags=flags, total_q=total_q + 9, total_k=total_k + 70
    )
    call = both(p, make_inputs(p, seed=43))
    used_q, used_k = torch.zeros(p.total_q, dtype=torch.bool), torch.zeros(p.total_k, dtype=torch.bool)
    for q0, q1, k0, k1 in fragments:
        used_q[q0:q1] = True
        if q1 > q0:
            used_k[k0:k1] = True
    for rows, names in ((~used_q, ("dq", "dq_proxy")), (~used_k, ("dk", "dv", "dk_proxy"))):
        for output in names:
            assert (call.outputs[output][rows.cuda()] == 0).all(), f"{output} is not zero outside"


@pytest.mark.parametrize(("dtype", "flags"), [(BF16, 0), (FP16, 0), (BF16, DETERMINISTIC)])
def test_long_dense(dtype, flags):
    """Rows that attend to more blocks than one fp16 sum of dQ takes, beside the portable kernels."""
    p = Problem((16, 1, 1, 1), documents([9000, 300]), dtype, dense=True, flags=flags)
    x = make_inputs(p, seed=51)
    call = ready(p, x)
    call.backward()
    x.update({name: call.outputs[name] for name in ("out", "lse")})
    portable = Call(Problem((16, 1, 1, 1), documents([9000, 300]), dtype, dense=True, flags=PORTABLE), x)
    portable.backward()
    for name in MAIN:
        got, want = call.outputs[name].double(), portable.outputs[name].double()
        size = want.flatten(1).norm(dim=1)
        rows = (got - want).flatten(1).norm(dim=1) / (size + size.mean())
        assert (got - want).norm() <= 6e-3 * want.norm(), name
        assert rows.max() < 0.05, f"{name}: row {rows.argmax()} is off by {rows.max():.3f}"


def hot_indices(tokens, heads, top_k):
    """Block 0, the token's own, and the ones before it."""
    own = torch.arange(tokens, device="cuda") // 128
    back = own[:, None] - torch.arange(top_k - 1, device="cuda")
    back[:, -1] = torch.where(own < top_k - 1, -1, 0)
    return back.clamp(min=-1).int()[None].expand(heads, -1, -1).contiguous()


@pytest.mark.parametrize("flags", [0, DETERMINISTIC])
@pytest.mark.parametrize("heads", [(16, 1, 1, 1), (16, 1, 4, 1), (4, 1, 1, 1)])
def test_hot_block(heads, flags):
    """A block that all tokens choose is cut into items, which add up."""
    p = Problem(heads, documents([2900]), BF16, top_k=4, flags=flags)
    x = make_inputs(p, seed=44)
    x["block_indices"] = hot_indices(2900, heads[2], 5)[..., :4]
    both(p, x)


@pytest.mark.parametrize("name", ["sparse", "long lists", "deterministic", "dense", "deterministic dense"])
def test_chunks(name):
    """The least scratch, more of it, and as much as the library likes give the same."""
    flags = DETERMINISTIC if "deterministic" in name else 0
    top_k = 40 if name == "long lists" else 6
    length = 6000 if name == "long lists" else 1800
    options = {"top_k": top_k, "dense": "dense" in name, "flags": flags}
    heads, lengths = (16, 2, 4, 1), [length, 300]
    p = Problem(heads, documents(lengths), BF16, **options)
    x = make_inputs(p, seed=45)
    call = ready(p, x)
    call.backward_with_proxy()
    if name != "long lists":
        check(p, x, call, MAIN + PROXY)
    whole = results(call, MAIN + PROXY)
    least = least_scratch(p)
    for limit in (least, least + (8 << 20)):
        q = Problem(heads, documents(lengths), BF16, scratch_limit=limit, **options)
        chunked = Call(q, {**x, "out": call.outputs["out"], "lse": call.outputs["lse"]})
        if not p.dense:
            chunked.inputs["block_indices"] = call.outputs["block_indices"]
            chunked.schedule()
        chunked.backward_with_proxy()
        for output, want in whole.items():
            got = chunked.outputs[output].double()
            error = (got - want.double()).norm() / want.double().norm()
            assert error < 5e-3, f"{output}: off by {error:.2e} with scratch of {limit} bytes"


def least_scratch(p):
    """Bytes that the refusal of a scratch limit of one byte says are needed."""
    q = Problem(p.heads, p.fragments, p.dtype, top_k=p.top_k, dense=p.dense, flags=p.flags, scratch_limit=1)
    least = 0
    for operation in (BACKWARD, BACKWARD_WITH_PROXY):
        for _ in range(4):
            try:
                Call(q, make_inputs(q)).prepare(operation, [])
                break
            except Failure as failure:
                q.scratch_limit = int(re.search(r"at least (\d+) bytes", str(failure)).group(1))
        least = max(least, q.scratch_limit)
    return least


@pytest.mark.parametrize("flags", [0, DETERMINISTIC])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_calls_that_follow_each_other(dtype, dense, flags):
    """Kernels that start early keep their order in a graph, among chunks, and behind a call with the same memory."""
    p = Problem((16, 2, 4, 1), documents([900, 1, 300]), dtype, top_k=4, dense=dense, flags=flags)
    x = make_inputs(p, seed=50)
    forward = ready(p, x)
    p.scratch_limit = least_scratch(p) + (2 << 20)
    call = Call(p, {**x, "out": forward.outputs["out"], "lse": forward.outputs["lse"]})
    if not dense:
        call.inputs["block_indices"] = forward.outputs["block_indices"]
        call.schedule()
    prepared = call.prepare(BACKWARD_WITH_PROXY, MAIN + PROXY)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call.enqueue(BACKWARD_WITH_PROXY, prepared)
    for name in MAIN + PROXY:
        call.buffers[name].poison()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert all(buffer.intact() for buffer in call.buffers.values())
    check(p, x, call, MAIN + PROXY)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("heads", [(64, 4, 4, 1), (16, 1, 4, 1), (32, 8, 2, 1)])
def test_same_bits(heads, dense):
    p = Problem(heads, documents([3000, 77]), BF16, top_k=8, dense=dense, flags=DETERMINISTIC)
    call = ready(p, make_inputs(p, seed=46))
    first = None
    for _ in range(20):
        call.backward_with_proxy()
        again = results(call, MAIN + PROXY)
        first = first or again
        for name in first:
            assert torch.equal(first[name], again[name]), f"{name} differs between runs"


def test_same_bits_beside_another_document():
    """In deterministic mode a document's gradients do not depend on what the tokens of another select."""
    p = Problem((64, 4, 4, 1), documents([20000, 20000]), BF16, top_k=16, flags=DETERMINISTIC)
    x = make_inputs(p, seed=48)
    gradients = []
    for _ in range(2):
        call = ready(p, x)
        call.backward_with_proxy()
        gradients.append({name: call.outputs[name][20000:].clone() for name in (*MAIN, "dq_proxy")})
        for name in ("q_proxy", "k_proxy"):
            x[name][:20000] = x[name][:20000].flip(0).clone()
    for name, want in gradients[0].items():
        assert torch.equal(gradients[1][name], want), name


@pytest.mark.parametrize("dense", [False, True])
def test_optional_outputs(dense):
    """Every subset of outputs has the values of all together."""
    p = Problem((16, 2, 2, 1), documents([500]), BF16, top_k=2, dense=dense, flags=DETERMINISTIC)
    call = ready(p, make_inputs(p, seed=47))
    call.backward_with_proxy()
    whole = results(call, MAIN + PROXY)
    for outputs in (["dq"], ["dk"], ["dv"], ["dq", "dv"], ["dk", "kl"], ["dq", "dq_proxy"], ["dk_proxy"], ["kl"]):
        call.backward_with_proxy(outputs)
        for name in outputs:
            error = (call.outputs[name].double() - whole[name].double()).norm() / whole[name].double().norm()
            assert error < 1e-3, f"{name} of {outputs}"
    call.backward(["dv"])
    assert dense or torch.equal(call.outputs["dv"], whole["dv"])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_other_documents_do_not_leak(value, dense):
    """Whatever stands in the documents around, and in later blocks, a document's gradients have the same bits."""
    p = Problem((16, 2, 4, 1), documents([200, 333, 190]), BF16, top_k=2, dense=dense)
    x = make_inputs(p, seed=48)
    if not dense:
        x["block_indices"] = hot_indices(723, 4, 3)[..., :2].clone()
        own = torch.cat([torch.arange(n) for n in (200, 333, 190)]).cuda() // 128
        x["block_indices"][..., 0], x["block_indices"][..., 1] = own, torch.where(own > 0, 0, -1)
    call = ready(p, x)
    call.backward()
    want = results(call, MAIN)
    x.update({name: call.outputs[name].clone() for name in ("out", "lse")})
    for name in ("q", "k", "v", "out", "dout"):
        x[name][:200] = value
        x[name][533:] = value
    x["lse"][:, :200] = x["lse"][:, 533:] = value
    call = Call(p, x)
    if not dense:
        call.schedule()
    call.backward()
    for name in MAIN:
        got = call.outputs[name][200:533]
        assert torch.isfinite(got).all(), name
        error = (got.double() - want[name][200:533].double()).norm() / want[name][200:533].double().norm()
        assert error < 4e-3, f"{name} changed by {error:.2e}"


@pytest.mark.parametrize("scale", [1.0, 65536.0, 2.0**-14])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_loss_scale(dtype, scale):
    """The sums of dQ in fp16 hold gradients of any size."""
    p = Problem((16, 2, 4, 1), documents([700]), dtype, top_k=3)
    x = make_inputs(p, seed=49)
    x["dout"] = (x["dout"] * 2.0**-13 * scale).to(dtype)
    call = ready(p, x)
    call.backward()
    portable = Call(Problem((16, 2, 4, 1), documents([700]), dtype, top_k=3, flags=PORTABLE), {**x, **call.outputs})
    portable.buffers["schedule"] = call.buffers["schedule"]
    portable.inputs.update({name: call.outputs[name] for name in ("out", "lse")})
    for name in MAIN:
        portable.inputs.pop(name, None)
    portable.backward()
    for name in MAIN:
        got, want = call.outputs[name].double(), portable.outputs[name].double()
        assert (got - want).norm() <= (4e-3 if dtype == BF16 else 2e-3) * want.norm(), name


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", ["expanded", "transposed", "fused"])
def test_strides(name, dense):
    p = Problem((16, 2, 2, 1), documents([300]), BF16, top_k=2, dense=dense)
    x = make_inputs(p, seed=50)
    if name == "expanded":
        x["dout"] = torch.randn(1, 1, 128, device="cuda").to(BF16).expand(300, 16, 128)
    elif name == "transposed":
        x["dout"] = x["dout"].transpose(0, 1).contiguous().transpose(0, 1)
        x["q"] = x["q"].transpose(0, 1).contiguous().transpose(0, 1)
    else:
        fused = torch.cat([x["q"], x["k"], x["v"]], 1).contiguous()
        x["q"], x["k"], x["v"] = fused[:, :16], fused[:, 16:18], fused[:, 18:]
    both(p, x)

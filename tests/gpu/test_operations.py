"""Every operation against the definition in fp64, over types, dimensions, head relations and fragments."""

import pytest
import torch
from fmsa import (
    BACKWARD,
    BACKWARD_WITH_PROXY,
    DETERMINISTIC,
    FORWARD,
    FP32_KV_GRADS,
    Call,
    Failure,
    Problem,
    documents,
    make_inputs,
)
from reference import compare, evaluate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = [1, 127, 128, 129, 255, 256, 257]
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
]


def step(p, x, proxy=True):
    """One step, compared with the definition on the selection that it used."""
    call = Call(p, x)
    outputs = call.step(proxy)
    indices = None if p.dense else call.inputs.get("block_indices", outputs.get("block_indices"))
    compare(p, x, indices, {n: o for n, o in outputs.items() if n != "block_indices"})
    return call


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads, dtype, dense):
    p = Problem(heads, documents([700, 1, 130, 257]), dtype, block=128, top_k=3, dense=dense)
    step(p, make_inputs(p, seed=1))


@pytest.mark.parametrize("flags", [0, DETERMINISTIC])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    "dim,proxy_dim,block", [(64, 64, 64), (64, 128, 128), (128, 64, 64), (128, 128, 64), (64, 64, 128)]
)
def test_dimensions(dim, proxy_dim, block, dtype, dense, flags):
    p = Problem(
        (16, 2, 4, 1), documents([*RAGGED, 600]), dtype, dim, proxy_dim, block, top_k=3, dense=dense, flags=flags
    )
    step(p, make_inputs(p, seed=2))


@pytest.mark.parametrize("sharpness", [1, 3, 8])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("flags", [0, DETERMINISTIC, FP32_KV_GRADS, DETERMINISTIC | FP32_KV_GRADS])
def test_sharp_softmax_and_flags(sharpness, dtype, flags):
    p = Problem((16, 4, 4, 2), documents([900, 33]), dtype, 64, 64, 64, top_k=5, flags=flags)
    step(p, make_inputs(p, seed=3, sharpness=sharpness))


@pytest.mark.parametrize("top_k", [1, 2, 12, 33, 64, 128])
def test_top_k(top_k):
    p = Problem(
        (8, 2, 2, 1), documents([1500, 100]), BF16, 64, 64, 64, top_k=top_k, local_blocks=min(2, top_k), init_blocks=1
    )
    step(p, make_inputs(p, seed=4))


FRAGMENTS = {
    "context parallel": [(0, 90, 0, 190), (90, 200, 0, 1100), (200, 203, 1100, 1103)],
    "growing shared keys": [(0, 50, 0, 50), (50, 80, 0, 70), (80, 90, 0, 300), (90, 100, 0, 110)],
    "keys without queries": [(0, 0, 0, 500), (0, 60, 500, 700), (60, 60, 700, 900), (60, 100, 900, 1000)],
    "gaps": [(3, 10, 5, 12), (12, 300, 20, 400)],
    "empty documents": documents([0, 0, 7, 0, 293]),
    "padded offsets": documents([100, 200, 0, 0, 0]),
    "one token": documents([1]),
    "no fragments": [],
}


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments(name, dense):
    fragments = FRAGMENTS[name]
    p = Problem(
        (8, 2, 4, 1),
        fragments,
        BF16,
        64,
        64,
        64,
        top_k=3,
        dense=dense,
        total_q=max([f[1] for f in fragments], default=0) + 9,
        total_k=max([f[3] for f in fragments], default=0) + 70,
    )
    call = step(p, make_inputs(p, seed=5))
    used_q, used_k = torch.zeros(p.total_q, dtype=torch.bool), torch.zeros(p.total_k, dtype=torch.bool)
    for q0, q1, k0, k1 in fragments:
        used_q[q0:q1] = True
        if q1 > q0:
            used_k[k0:k1] = True
    for rows, names in ((~used_q, ("out", "dq", "dq_proxy")), (~used_k, ("dk", "dv", "dk_proxy"))):
        for output in names:
            assert (call.outputs[output][rows.cuda()] == 0).all(), f"{output} is not zero outside"
    assert (call.outputs["lse"][:, ~used_q.cuda()] == float("-inf")).all()


def test_caller_indices_in_any_order():
    """Unsorted, -1 in the middle, empty rows, blocks that do not exist, duplicates; the order changes nothing."""
    p = Problem((8, 2, 4, 1), documents([700, 120]), BF16, 64, 64, 64, top_k=6, flags=DETERMINISTIC)
    x = make_inputs(p, seed=6)
    g = torch.Generator(device="cuda").manual_seed(7)
    indices = torch.randint(-2, 14, (4, 820, 6), generator=g, device="cuda", dtype=torch.int32)
    indices[1, 5:50] = -1
    first = step(p, {**x, "block_indices": indices})
    empty = first.outputs["lse"][2:4, 5:50]
    assert (empty == float("-inf")).all() and (first.outputs["out"][5:50, 2:4] == 0).all()
    shuffled = indices[..., torch.randperm(6)].contiguous()
    second = step(p, {**x, "block_indices": shuffled})
    for name, value in first.outputs.items():
        assert torch.equal(value, second.outputs[name]), name


def test_sink():
    p = Problem((16, 2, 4, 1), documents([5000]), BF16, 64, 64, 64, top_k=2)
    newest = (torch.arange(5000, device="cuda") // 64).int()
    indices = torch.stack([torch.zeros_like(newest), newest], 1)[None].repeat(4, 1, 1)
    indices[:, :64, 1] = -1
    step(p, {**make_inputs(p, seed=8), "block_indices": indices})


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("factor", [3, 50])
def test_large_scores(dtype, factor):
    p = Problem((8, 2, 4, 1), documents([600]), dtype, 64, 64, 64, top_k=3)
    x = make_inputs(p, seed=9)
    x["q"] *= factor
    x["q_proxy"] *= factor
    step(p, x)


def test_lse_far_from_zero():
    p = Problem((4, 1, 2, 1), documents([256]), BF16, 64, 64, 64, top_k=4)
    for offset in (-120.0, 600.0):
        x = make_inputs(p, seed=10)
        x["q"][..., 0] = 8.0
        x["k"][..., 0] = offset
        call = step(p, x)
        assert (call.outputs["lse"].mean() - offset).abs() < 20


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_fp16_gradients_do_not_underflow(scale):
    p = Problem((8, 2, 4, 1), documents([1024]), FP16, 64, 64, 64, top_k=3, kl_count=4_000_000)
    x = make_inputs(p, seed=11)
    x["dout"] *= 1e-3
    x["grad_kl"][:] = scale
    call = Call(p, x)
    call.step()
    exact, _ = evaluate(p, x, call.outputs["block_indices"])
    for name in ("dq_proxy", "dk_proxy"):
        got, want = call.outputs[name].double(), exact[name].to(FP16).double()
        worst = (got - want).abs() - (2.0**-9 * want.abs() + 2 * 2.0**-24)
        assert worst.max() <= 0.02 * want.abs().max(), name
        assert torch.equal(got == 0, want == 0) or ((got == 0) != (want == 0)).float().mean() < 0.05, name


def test_proxy_equal_to_main():
    """R = 1 and proxies that are the main queries and keys: KL 0, proxy gradients 0."""
    p = Problem((4, 2, 4, 2), documents([500]), FP32, 64, 64, 64, top_k=3)
    x = make_inputs(p, seed=12)
    x["q_proxy"], x["k_proxy"] = x["q"], x["k"]
    call = step(p, x)
    assert call.outputs["kl"].abs() < 1e-5
    assert call.outputs["dq_proxy"].abs().max() < 1e-5 and call.outputs["dk_proxy"].abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_k_of_all_blocks_equals_dense(dtype):
    p = Problem((8, 2, 4, 1), documents([512, 77]), dtype, 64, 64, 64, top_k=8, flags=DETERMINISTIC)
    x = make_inputs(p, seed=13)
    step(p, x)
    p.dense = True
    step(p, x)


def test_documents_alone_and_packed():
    """A change in one document leaves the others bit-identical."""
    lengths = [300, 1, 517, 64]
    p = Problem((8, 2, 4, 1), documents(lengths), BF16, 64, 64, 64, top_k=3, flags=DETERMINISTIC, kl_count=1000)
    x = make_inputs(p, seed=14)
    first = Call(p, x).step()
    changed = {n: v.clone() for n, v in x.items()}
    for name in ("q", "k", "v", "q_proxy", "k_proxy", "dout"):
        changed[name][301:818] = changed[name][301:818].flip(0)
    second = Call(p, changed).step()
    for name in ("out", "dq", "dk", "dv", "dq_proxy", "dk_proxy"):
        for rows in (slice(0, 301), slice(818, 882)):
            assert torch.equal(first[name][rows], second[name][rows]), name


def test_outputs_are_optional():
    p = Problem((8, 2, 4, 1), documents([700]), BF16, 64, 64, 64, top_k=3, flags=DETERMINISTIC)
    call = Call(p, make_inputs(p, seed=15))
    full = {n: v.clone() for n, v in call.step().items()}
    for outputs in (["dq"], ["dk"], ["dv"], ["dk", "dv"]):
        for name in ("dq", "dk", "dv"):
            call.outputs.pop(name, None)
        call.backward(outputs)
        assert set(call.outputs) & {"dq", "dk", "dv"} == set(outputs)
    for outputs in (["kl"], ["dq_proxy"], ["dk_proxy"], ["dq", "kl"], ["dq", "dk", "dv", "dk_proxy"]):
        for name in ("dq", "dk", "dv", "dq_proxy", "dk_proxy", "kl"):
            call.outputs.pop(name, None)
        call.backward_with_proxy(outputs)
        for name in outputs:
            compare(p, call.inputs, full["block_indices"], {name: call.outputs[name]})


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_proxy_loss_alone(dtype, dense):
    p = Problem((16, 2, 4, 1), documents([700, 131]), dtype, 128, 128, 128, top_k=3, dense=dense)
    x = make_inputs(p, seed=16)
    call = Call(p, x)
    if not dense:
        call.select()
        call.schedule()
    call.forward()
    for outputs in (("kl",), ("kl", "dq_proxy", "dk_proxy"), ("dk_proxy",)):
        call.proxy_loss(outputs)
        compare(p, x, call.outputs.get("block_indices"), {n: call.outputs[n] for n in outputs})


def test_no_grad_kl_means_one():
    p = Problem((8, 2, 4, 1), documents([300]), FP32, 64, 64, 64, top_k=3)
    x = make_inputs(p, seed=17)
    x["grad_kl"][:] = 1
    with_one = Call(p, x).step()
    del x["grad_kl"]
    without = Call(p, x).step()
    assert torch.allclose(with_one["dq_proxy"], without["dq_proxy"], rtol=1e-4, atol=1e-9)


def test_strided_views():
    """A fused QKV tensor, dout of stride 0 and transposed dout."""
    p = Problem((8, 2, 4, 1), documents([700]), BF16, 64, 64, 64, top_k=3)
    x = make_inputs(p, seed=18)
    fused = torch.empty(700, 8 + 2 + 2 + 4 + 1, 64, dtype=BF16, device="cuda")
    views = dict(zip(("q", "k", "v", "q_proxy", "k_proxy"), fused.split((8, 2, 2, 4, 1), 1)))
    for name, view in views.items():
        view.copy_(x[name])
    step(p, {**x, **views})
    step(p, {**x, "dout": torch.ones(1, 1, 64, dtype=BF16, device="cuda").expand(700, 8, 64)})
    step(p, {**x, "dout": x["dout"].transpose(0, 1).contiguous().transpose(0, 1)})


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("flags", [0, DETERMINISTIC])
def test_scratch_limit(dense, flags):
    """The least scratch that the library accepts gives the same results as its own choice."""
    p = Problem((16, 2, 4, 1), documents([3000, 1000, 70]), BF16, 64, 64, 64, top_k=4, dense=dense, flags=flags)
    x = make_inputs(p, seed=19)
    step(p, x)
    least = 1 << 30
    while least > 1024:
        p.scratch_limit = least // 2
        try:
            call = Call(p, x)
            for operation in (0, 1, FORWARD, BACKWARD, BACKWARD_WITH_PROXY)[2 * dense :]:
                call.prepare(operation, [])
        except Failure:
            break
        least //= 2
    p.scratch_limit = least
    step(p, x)


def test_cpu_backend_agrees():
    p = Problem((8, 2, 4, 1), documents([400, 1, 130]), FP32, 64, 64, 64, top_k=3)
    x = make_inputs(p, seed=20)
    call = Call(p, x)
    call.step()
    host = Problem((8, 2, 4, 1), documents([400, 1, 130]), FP32, 64, 64, 64, top_k=3, device="cpu")
    cpu = Call(host, {n: v.cpu() for n, v in x.items()})
    cpu.step()
    assert torch.equal(cpu.outputs["block_indices"], call.outputs["block_indices"].cpu())
    for name in ("out", "lse", "dq", "dk", "dv", "dq_proxy", "dk_proxy", "kl"):
        got, want = call.outputs[name].cpu(), cpu.outputs[name]
        assert (got - want).norm() <= 5e-5 * want.norm(), name

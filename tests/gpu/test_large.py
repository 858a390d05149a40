"""Sizes beyond 32-bit offsets, and many short documents: values at both ends, beside small references."""

import ctypes

import pytest
import torch
from fmsa import BACKWARD_WITH_PROXY, FORWARD, SCHEDULE, SELECT, Call, Problem, check, documents, lib, make_inputs
from reference import compare

BF16 = torch.bfloat16
ROWS = ("q", "q_proxy", "dout", "out", "dq", "dq_proxy", "k", "v", "k_proxy", "dk", "dv", "dk_proxy")


def part(values, rows):
    """The rows of one packed document."""
    result = {n: v[rows] for n, v in values.items() if n in ROWS}
    if "lse" in values:
        result["lse"] = values["lse"][:, rows]
    return result


def compare_ends(p, x, outputs, lengths):
    at = 0
    for length in lengths:
        rows = slice(at, at + length)
        at += length
        if length > 1000:
            continue
        small = Problem(
            p.heads, documents([length]), p.dtype, p.dim, p.proxy_dim, p.block, p.top_k, kl_count=p.kl_count
        )
        inputs = {**part(x, rows), "grad_kl": x["grad_kl"]}
        compare(small, inputs, outputs["block_indices"][:, rows], part(outputs, rows))


@pytest.mark.parametrize("fused", [False, True])
def test_offsets_beyond_31_bits(fused):
    lengths = [300, 262145 - 800, 500]
    p = Problem((64, 4, 4, 1), documents(lengths), BF16, top_k=16, kl_count=300)
    g = torch.Generator(device="cuda").manual_seed(1)
    if fused:
        whole = torch.randn(262145, 64 + 4 + 4 + 4 + 1, 128, generator=g, device="cuda", dtype=BF16)
        x = dict(zip(("q", "k", "v", "q_proxy", "k_proxy"), whole.split((64, 4, 4, 4, 1), 1)))
        x["dout"] = torch.randn(1, 1, 128, generator=g, device="cuda", dtype=BF16).expand(262145, 64, 128)
        x["grad_kl"] = torch.tensor([0.7], device="cuda")
    else:
        x = make_inputs(p, seed=1)
    assert 262145 * 64 * 128 > 2**31
    outputs = Call(p, x).step()
    compare_ends(p, x, outputs, lengths)
    for name, value in outputs.items():
        if name != "block_indices":
            assert all(torch.isfinite(v).all() for v in value.split(65536)), name


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("count,length", [(12288, 16), (70000, 3)])
def test_many_documents(count, length, dense):
    """Every document is its own small problem: all of them at once in fp64."""
    p = Problem((8, 2, 4, 1), documents([length] * count), BF16, 64, 64, 64, top_k=2, dense=dense, max_seqlen_k=length)
    x = make_inputs(p, seed=2)
    outputs = Call(p, x).step()
    q, k, v = (x[n].double().view(count, length, -1, 64) for n in "qkv")
    s = torch.einsum("cqhd,ckhd->chqk", q, k.repeat_interleave(4, 2)) / 8
    s.masked_fill_(torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1), float("-inf"))
    out = torch.einsum("chqk,ckhd->cqhd", s.softmax(-1), v.repeat_interleave(4, 2)).reshape(p.total_q, 8, 64)
    assert (outputs["out"].double() - out).norm() < 4e-3 * out.norm()
    lse = torch.logsumexp(s, -1).transpose(1, 2).reshape(p.total_q, 8).T
    assert (outputs["lse"] - lse).abs().max() < 1e-3
    last = slice(p.total_q - 20 * length, p.total_q)
    small = Problem(p.heads, documents([length] * 20), BF16, 64, 64, 64, top_k=2, dense=dense, kl_count=p.total_q * 4)
    inputs = {**part(x, last), "grad_kl": x["grad_kl"]}
    indices = None if dense else outputs["block_indices"][:, last]
    compare(small, inputs, indices, part(outputs, last))


def test_scratch_grows_with_the_total():
    """One long document among short ones asks for no more than its share."""
    mixed = Problem((16, 2, 4, 1), documents([131072, *[1024] * 63]), BF16, top_k=16)
    config = mixed.config()
    total = 0
    for operation in (SELECT, SCHEDULE, FORWARD, BACKWARD_WITH_PROXY):
        size = ctypes.c_size_t()
        check(lib.fmsa_workspace_bytes(ctypes.byref(config), operation, ctypes.byref(size)))
        total = max(total, size.value)
    assert total < 5 << 30


def test_values_of_the_giant_document():
    """A handful of rows deep in a long document, by the definition."""
    p = Problem((16, 2, 4, 1), documents([50000]), BF16, 64, 64, 64, top_k=8)
    x = make_inputs(p, seed=3)
    outputs = Call(p, x).step(proxy=False)
    for row in (49999, 31234, 4097):
        for head in (0, 7, 15):
            blocks = outputs["block_indices"][head // 4, row]
            keys = torch.cat(
                [torch.arange(b * 64, min(b * 64 + 64, row + 1)) for b in blocks.tolist() if b >= 0]
            ).cuda()
            s = x["k"][keys, head // 8].double() @ x["q"][row, head].double() / 8
            want = s.softmax(0) @ x["v"][keys, head // 8].double()
            got = outputs["out"][row, head].double()
            assert (got - want).norm() < 8e-3 * want.norm()
            assert (outputs["lse"][head, row] - torch.logsumexp(s, 0)).abs() < 1e-3

"""What only a card shows: streams, graphs, synchronisation, larger deterministic runs, the host's time."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from conftest import Inputs, make_inputs

import flashmsa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")
HEADS = (16, 2, 4, 1)
BF16 = torch.bfloat16


def inputs(lengths: list[int], seed: int = 0) -> Inputs:
    return make_inputs(lengths, HEADS, 128, BF16, "cuda", seed)


def step(x: Inputs, **options) -> list[torch.Tensor]:
    """out, kl and the five gradients."""
    out, kl = flashmsa.flash_msa_varlen_func(
        x.q, x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, 0, 0, 4, return_kl=True, **options
    )
    return [out, kl, *torch.autograd.grad([out, kl], x.leaves(), [torch.ones_like(out), torch.ones_like(kl)])]


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def test_nothing_synchronises():
    x = inputs([1000, 24, 513])
    batched = [t.detach()[None].transpose(1, 2).requires_grad_() for t in x.leaves()]
    metric = torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x)
        step(x, deterministic=True, kl_metric=metric)
        step(x, kl_value=False, kl_metric=metric)
        for function in (flashmsa.flash_msa_func, flashmsa.flash_msa_warmup_func):
            out, kl = function(*batched, 512, 128**-0.5)
            (out.sum() + kl).backward()
        selection = flashmsa.ops.select(x.q_proxy.detach(), x.k_proxy.detach(), x.cu, x.cu, 4)
        out, kl, _ = flashmsa.ops.attention(*x.leaves(), None, x.cu, x.cu, 4, block_indices=selection)
        (out.sum() + kl).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert metric.item() > 0


def test_graph_is_replayed_with_other_documents():
    """One captured step, forward and backward, serves every cu_seqlens of the same total and count, also one padded by
    repeated last offsets."""
    x = inputs([700, 300, 500])
    step(x, deterministic=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(x, deterministic=True)
    for cu in ([0, 700, 1000, 1500], [0, 1, 1499, 1500], [0, 1500, 1500, 1500]):
        x.cu.copy_(torch.tensor(cu, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(results, step(x, deterministic=True))


def test_drop_in_function_in_a_graph():
    x = inputs([1024])
    batched = [t.detach()[None].transpose(1, 2) for t in x.leaves()]
    expected, expected_kl = flashmsa.flash_msa_func(*batched, 512, 128**-0.5, deterministic=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, kl = flashmsa.flash_msa_func(*batched, 512, 128**-0.5, deterministic=True)
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(kl, expected_kl)


def test_side_streams():
    """Two steps on two streams while the default stream is busy."""
    cases = [inputs([900, 100], seed) for seed in (1, 2)]
    expected = [step(x, deterministic=True) for x in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda._sleep(50_000_000)
    results = []
    for stream, x in zip(streams, cases, strict=True):
        with torch.cuda.stream(stream):
            results.append(step(x, deterministic=True))
    assert not torch.cuda.current_stream().query()
    for stream in streams:
        stream.synchronize()
    for mine, theirs in zip(results, expected, strict=True):
        assert_equal(mine, theirs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card")
def test_other_device():
    x = inputs([500])
    expected = step(x, deterministic=True)
    other = Inputs(*[t.detach().to("cuda:1").requires_grad_() for t in x.leaves()], x.cu.to("cuda:1"))
    results = step(other, deterministic=True)
    assert torch.cuda.current_device() == 0
    assert_equal([t.to("cuda:0") for t in results], expected)


def test_tensors_on_two_devices_are_refused():
    x = inputs([100])
    with pytest.raises(ValueError, match="k is on cpu and q_proxy is on cuda:0"):
        flashmsa.flash_msa_varlen_func(x.q, x.k.cpu(), x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, 0, 0, 4)
    with pytest.raises(ValueError, match="cu_seqlens_q is on cpu; it must be on cuda:0"):
        flashmsa.flash_msa_varlen_func(x.q, x.k, x.v, x.q_proxy, x.k_proxy, x.cu.cpu(), x.cu, 0, 0, 4)


def test_unaligned_pointers():
    """Inputs off 16 bytes are refused; a gradient off 16 bytes, which the caller does not choose, is copied."""
    x = inputs([64])
    shifted = torch.zeros(x.q.numel() + 1, dtype=BF16, device="cuda")[1:].view_as(x.q)
    with pytest.raises(ValueError, match=r"q.data is .*multiple of 16 bytes"):
        flashmsa.flash_msa_varlen_func(shifted, x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, 0, 0, 4)
    out = flashmsa.flash_msa_varlen_func(x.q, x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, 0, 0, 4)
    out.backward(shifted)
    assert x.q.grad.abs().max() == 0


def test_unsupported_dimension_is_named():
    x = make_inputs([64], HEADS, 80, BF16, "cuda")
    with pytest.raises(RuntimeError, match="head_dim"):
        step(x)


def test_deterministic_repeats():
    x = inputs([4096, 1000])
    expected = step(x, deterministic=True)
    for _ in range(20):
        assert_equal(step(x, deterministic=True), expected)


def test_fp16_proxy_gradients_do_not_underflow():
    """With a loss scale of 1, N = tokens x heads must divide in fp32, before the result is rounded."""
    x = make_inputs([4096], HEADS, 128, torch.float16, "cuda")
    _, _, dq_proxy, dk_proxy, *_ = step(x)
    assert (dk_proxy != 0).float().mean() > 0.8
    scaled = torch.autograd.grad(
        flashmsa.flash_msa_varlen_func(
            x.q, x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, 0, 0, 4, return_kl=True, kl_value=False
        )[1],
        x.leaves()[:2],
        torch.tensor(65536.0, device="cuda"),
    )
    for mine, large in zip((dq_proxy, dk_proxy), scaled, strict=True):
        error = (mine.double() - large.double() / 65536).norm() / (large.double() / 65536).norm()
        assert error < 0.1


def test_packing_does_not_leak():
    """NaN in one document and behind the last leaves the others bit-identical, gradients too."""
    x = inputs([300, 200, 500])
    expected = step(x, deterministic=True)
    y = x.clone()
    with torch.no_grad():
        for t in y.leaves():
            t[300:500] = float("nan")
    results = step(y, deterministic=True)
    rows = torch.cat([torch.arange(0, 300), torch.arange(500, 1000)]).cuda()
    for name in (0, 2, 3, 4, 5, 6):
        assert torch.equal(results[name][rows], expected[name][rows])


FIRST_CALL = """
import time, torch
torch.ones(8, device="cuda").sum().item()  # the driver and PyTorch have started
start = time.perf_counter()
import flashmsa
x = [torch.randn(777, h, 64, device="cuda", dtype=torch.float16).requires_grad_() for h in (8, 2, 8, 4, 4)]
cu = torch.tensor([0, 500, 777], dtype=torch.int32, device="cuda")
q_proxy, k_proxy, q, k, v = x
out, kl = flashmsa.flash_msa_varlen_func(q, k, v, q_proxy, k_proxy, cu, cu, 0, 0, 4, return_kl=True)
(out.float().sum() + kl).backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def test_first_call_after_import_is_quick():
    """Nothing is compiled at run time: import, the first forward and the first backward pass take under a second."""
    result = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 0 < float(result.stdout) < 1.0

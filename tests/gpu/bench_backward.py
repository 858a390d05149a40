"""The backward of the main attention, sparse and dense, beside cuBLAS and cuDNN in the same run.

Rates are useful operations over time, 10 * D a main head and visible selected (token, key) pair, whatever the kernels
really do, and all kernels of the operation count. "over_cublas" divides by the rate of cuBLAS bf16 8192^3 in steady
state of the same run. What the proxy loss adds is in bench_proxy.py."""

import torch
from fmsa import BACKWARD, BACKWARD_WITH_PROXY, DETERMINISTIC, FORWARD, SCHEDULE, SELECT
from measure import BF16, GEMM_FLOP, M3, SMALL, Steps, gemm_task, steady
from torch.nn.attention import SDPBackend, sdpa_kernel

SPARSE = (SELECT, SCHEDULE, FORWARD, BACKWARD)


def rate(steps, heads, ms):
    """TFLOP/s of a backward of D = 128 that takes ms."""
    return 10 * 128 * heads[0] * steps.pairs() / ms / 1e9


def shape_of(heads, tokens):
    return f"{'/'.join(map(str, heads))} heads, {tokens:,} tokens, D 128, bf16"


def bench_sparse_backward(figures, kind, label, heads, tokens, sets):
    steps = Steps(heads, tokens, sets, kind, SPARSE)
    ms = steady({"backward": steps.task(BACKWARD), "gemm": gemm_task()})
    gemm, tflops = GEMM_FLOP / ms["gemm"] / 1e9, rate(steps, heads, ms["backward"])
    shape = f"{shape_of(heads, tokens)}, k 16, selection {kind}"
    figures[f"backward.{kind}.ms.{label}"] = (ms["backward"], "ms", shape)
    figures[f"backward.{kind}.tflops.{label}"] = (tflops, "TFLOP/s", shape)
    figures[f"backward.{kind}.over_cublas.{label}"] = (tflops / gemm, "x", f"of {gemm:.0f} TFLOP/s in the same run")


def bench_deterministic(figures, label, heads, tokens):
    """Everything in a fixed order, with the proxy gradients and without."""
    operations = (*SPARSE, BACKWARD_WITH_PROXY)
    free = Steps(heads, tokens, 1, operations=operations)
    fixed = Steps(heads, tokens, 1, operations=operations, flags=DETERMINISTIC)
    ms = steady(
        {
            "free": free.task(BACKWARD),
            "fixed": fixed.task(BACKWARD),
            "free with proxy": free.task(BACKWARD_WITH_PROXY),
            "fixed with proxy": fixed.task(BACKWARD_WITH_PROXY),
        }
    )
    shape = f"{shape_of(heads, tokens)}, k 16, random selection"
    for name, suffix in (("backward", ""), ("backward_with_proxy", " with proxy")):
        overhead = ms[f"fixed{suffix}"] / ms[f"free{suffix}"]
        figures[f"{name}.deterministic_overhead.{label}"] = (overhead, "x", f"time in a fixed order over any; {shape}")


def cudnn_backward_task(heads, kv_heads, tokens, dim):
    """cuDNN's causal backward alone, through PyTorch: the forward is run once."""
    q, k, v = (
        torch.randn(1, h, tokens, dim, device="cuda", dtype=BF16, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    dout = torch.randn_like(out)
    return lambda i: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def bench_dense_backward(figures, label, heads, tokens, sets, seconds):
    steps = Steps(heads, tokens, sets, operations=(FORWARD, BACKWARD), dense=True)
    cudnn = cudnn_backward_task(heads[0], heads[1], tokens, 128)
    ms = steady({"ours": steps.task(BACKWARD), "cudnn": cudnn}, seconds=seconds)
    shape = f"dense causal, {shape_of(heads, tokens)}"
    figures[f"dense.backward.tflops.{label}"] = (rate(steps, heads, ms["ours"]), "TFLOP/s", shape)
    figures[f"dense.backward.over_cudnn.{label}"] = (ms["cudnn"] / ms["ours"], "x", f"cuDNN's time over ours; {shape}")


def measure_backward(figures):
    for kind in ("random", "recent"):
        bench_sparse_backward(figures, kind, "m3.64k", M3, 65536, 2)
        torch.cuda.empty_cache()
    bench_sparse_backward(figures, "random", "flashmsa_case.16k", SMALL, 16384, 4)
    torch.cuda.empty_cache()
    bench_deterministic(figures, "m3.64k", M3, 65536)
    for label, tokens, seconds in (("m3.8k", 8192, 0.25), ("m3.32k", 32768, 0.5)):
        torch.cuda.empty_cache()
        bench_dense_backward(figures, label, M3, tokens, 2, seconds)

"""The forward, sparse and dense, beside cuBLAS and cuDNN in the same run.

Rates are useful operations over time, 4 * D a main head and visible selected (token, key) pair, whatever the kernels
really do. "over_cublas" divides by the rate of cuBLAS bf16 8192^3 in steady state of the same run, so that cards and
clocks cancel."""

import json
import pathlib

import torch
from fmsa import FORWARD, KEY_OUTER, QUERY_OUTER, SCHEDULE, SELECT
from measure import GEMM_FLOP, M3, SMALL, Steps, dense_tasks, gemm_task, steady

KINDS = ("random", "agree32", "recent", "trained")
SPARSE = (SELECT, SCHEDULE, FORWARD)
PACKS = pathlib.Path(__file__).parents[1] / "packs_192k.json"


def rate(steps, heads, ms):
    """TFLOP/s of a forward of D = 128 that takes ms."""
    return 4 * 128 * heads[0] * steps.pairs() / ms / 1e9


def shape_of(heads, tokens):
    return f"{'/'.join(map(str, heads))} heads, {tokens:,} tokens, D 128, k 16, bf16"


def bench_sparse_forward(figures, label, heads, tokens, sets, rounds=3):
    """Selections from random to fully agreeing; the whole way from proxies to output beside cuDNN's dense forward."""
    steps = {kind: Steps(heads, tokens, sets, kind, SPARSE) for kind in KINDS}
    tasks = {kind: s.task(FORWARD) for kind, s in steps.items()}
    dense, _ = dense_tasks(heads[0], heads[1], tokens, 128, sets)
    whole = steps["random"].task(*SPARSE)
    ms = steady({**tasks, "gemm": gemm_task(), "dense": dense, "whole": whole}, rounds)
    gemm, shape = GEMM_FLOP / ms["gemm"] / 1e9, shape_of(heads, tokens)
    for kind in KINDS:
        tflops = rate(steps[kind], heads, ms[kind])
        figures[f"forward.{kind}.tflops.{label}"] = (tflops, "TFLOP/s", f"{shape}, selection {kind}")
        figures[f"forward.{kind}.over_cublas.{label}"] = (tflops / gemm, "x", f"of {gemm:.0f} TFLOP/s in the same run")
    how = f"cuDNN's dense causal forward over select + schedule + forward; {shape}"
    figures[f"forward.over_cudnn.{label}"] = (ms["dense"] / ms["whole"], "x", how)


def bench_one_way_alone(figures, label, heads, tokens, sets, rounds=2):
    """What the split adds: every block key-outer, and every block query-outer, over both together."""
    ways = {"": 0, "key_outer": KEY_OUTER, "query_outer": QUERY_OUTER}
    for kind in KINDS:
        tasks = {}
        for way, flag in ways.items():
            steps = Steps(heads, tokens, sets, kind, SPARSE, flags=flag)
            tasks[way] = steps.task(FORWARD)
        ms = steady(tasks, rounds)
        for way in ways:
            if way:
                how = f"time of every block {way.replace('_', '-')} over ours; {shape_of(heads, tokens)}, {kind}"
                figures[f"forward.{kind}.over_{way}.{label}"] = (ms[way] / ms[""], "x", how)
        del steps, tasks
        torch.cuda.empty_cache()


def bench_dense_forward(figures, label, heads, tokens, sets, rounds=3):
    steps = Steps(heads, tokens, sets, operations=(FORWARD,), dense=True)
    cudnn, _ = dense_tasks(heads[0], heads[1], tokens, 128, sets)
    ms = steady({"ours": steps.task(FORWARD), "cudnn": cudnn, "gemm": gemm_task()}, rounds)
    shape = f"dense causal, {shape_of(heads, tokens)}"
    figures[f"dense.forward.tflops.{label}"] = (rate(steps, heads, ms["ours"]), "TFLOP/s", shape)
    figures[f"dense.forward.over_cudnn.{label}"] = (ms["cudnn"] / ms["ours"], "x", f"cuDNN's time over ours; {shape}")
    over_cublas = rate(steps, heads, ms["ours"]) / (GEMM_FLOP / ms["gemm"] / 1e9)
    figures[f"dense.forward.over_cublas.{label}"] = (over_cublas, "x", shape)


def bench_packed_forward(figures, rounds=2):
    """Real document lengths, M3 heads: sparse with what random proxies select, and dense."""
    for name, lengths in json.loads(PACKS.read_text())["packs"].items():
        tokens = sum(lengths)
        steps = Steps(M3, tokens, 1, "random", SPARSE, lengths)
        ms = steady({"forward": steps.task(FORWARD), "gemm": gemm_task()}, rounds)
        gemm = GEMM_FLOP / ms["gemm"] / 1e9
        shape = f"pack {name}: {len(lengths)} documents; {shape_of(M3, tokens)}, random selection"
        figures[f"forward.pack{name}.ms.m3.192k"] = (ms["forward"], "ms", shape)
        figures[f"forward.pack{name}.over_cublas.m3.192k"] = (rate(steps, M3, ms["forward"]) / gemm, "x", shape)
        del steps
        torch.cuda.empty_cache()


def measure_forward(figures):
    bench_sparse_forward(figures, "m3.16k", M3, 16384, 2)
    torch.cuda.empty_cache()
    bench_sparse_forward(figures, "m3.64k", M3, 65536, 1)
    torch.cuda.empty_cache()
    bench_one_way_alone(figures, "m3.64k", M3, 65536, 1)
    bench_sparse_forward(figures, "flashmsa_case.16k", SMALL, 16384, 4)
    torch.cuda.empty_cache()
    bench_dense_forward(figures, "m3.8k", M3, 8192, 4)
    bench_dense_forward(figures, "m3.32k", M3, 32768, 2)
    torch.cuda.empty_cache()
    bench_packed_forward(figures)

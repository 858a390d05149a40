"""Whole training steps (scores, top-k, schedule, forward, backward with KL) beside cuDNN's dense forward + backward."""

import torch
from fmsa import BACKWARD_WITH_PROXY, FORWARD, SCHEDULE, SELECT
from measure import M3, SMALL, Steps, dense_tasks, steady

STEP = (SELECT, SCHEDULE, FORWARD, BACKWARD_WITH_PROXY)
NAMES = {SELECT: "select", SCHEDULE: "schedule", FORWARD: "forward", BACKWARD_WITH_PROXY: "backward_with_proxy"}


def bench_step(figures, label, heads, tokens, sets, rounds=3):
    steps = Steps(heads, tokens, sets, operations=STEP)
    dense_forward, dense_backward = dense_tasks(heads[0], heads[1], tokens, 128, sets)

    def dense(i):
        dense_forward(i)
        dense_backward(i)

    parts = {name: steps.task(operation) for operation, name in NAMES.items()}
    ms = steady({"step": steps.task(*STEP), "dense": dense, **parts}, rounds)
    shape = f"{'/'.join(map(str, heads))} heads, {tokens:,} tokens, D 128, k 16, bf16, random selection"
    figures[f"step.ms.{label}"] = (ms["step"], "ms", f"select, schedule, forward, backward with KL; {shape}")
    for name in parts:
        figures[f"{name}.ms.{label}"] = (ms[name], "ms", shape)
    figures[f"cudnn.step.ms.{label}"] = (ms["dense"], "ms", f"cuDNN dense causal forward + backward; {shape}")
    figures[f"step.over_cudnn.{label}"] = (ms["dense"] / ms["step"], "x", "cudnn.step.ms over step.ms")
    figures[f"schedule.share.{label}"] = (ms["schedule"] / ms["step"], "", "schedule.ms over step.ms")


def measure_steps(figures):
    bench_step(figures, "flashmsa_case.16k", SMALL, 16384, 4)
    lengths = (("8k", 8192, 4, 3), ("16k", 16384, 3, 3), ("64k", 65536, 2, 2), ("128k", 131072, 1, 1))
    for label, tokens, sets, rounds in lengths:
        torch.cuda.empty_cache()
        bench_step(figures, f"m3.{label}", M3, tokens, sets, rounds)

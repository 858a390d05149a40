"""Measures the library and the ceilings beside it in one run, and writes results/<card>.json.

Every figure is the median of at least 12 runs in steady state: after a quarter of a second of load, all figures of a
group in turn, so that they share clocks and power. Inputs rotate over more than twice the L2 cache, and each input set
has a selection of its own. Useful work is counted by the formulas below, whatever the kernels really do."""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import time

import torch
from fmsa import BACKWARD, BACKWARD_WITH_PROXY, FORWARD, ROOT, SCHEDULE, SELECT, Call, Problem, documents, make_inputs
from torch.nn.attention import SDPBackend, sdpa_kernel

RUNS, WARM_SECONDS = 12, 0.25
GRADIENTS = ["dq", "dk", "dv", "dq_proxy", "dk_proxy", "kl"]
OUTPUTS = {
    SELECT: ["block_indices"],
    SCHEDULE: [],
    FORWARD: ["out", "lse"],
    BACKWARD: ["dq", "dk", "dv"],
    BACKWARD_WITH_PROXY: GRADIENTS,
}
BF16 = torch.bfloat16


def measure(tasks):
    """Median milliseconds of each task, a function of the iteration's number; all of them in turn."""
    times = {name: [] for name in tasks}
    start, i = time.monotonic(), 0
    while min(len(t) for t in times.values()) < RUNS:
        warm = time.monotonic() - start >= WARM_SECONDS and i >= 2
        events = {}
        for name, task in tasks.items():
            events[name] = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[name][0].record()
            task(i)
            events[name][1].record()
        torch.cuda.synchronize()
        if warm:
            for name, (begin, end) in events.items():
                times[name].append(begin.elapsed_time(end))
        i += 1
    return {name: statistics.median(t) for name, t in times.items()}


class Steps:
    """Calls over rotating input sets, with everything prepared but nothing enqueued."""

    def __init__(self, heads, tokens, sets, **options):
        self.problem = Problem(heads, documents([tokens]), BF16, top_k=16, **options)
        self.sets = []
        for seed in range(sets):
            call = Call(self.problem, make_inputs(self.problem, seed=seed))
            prepared = {operation: call.prepare(operation, outputs) for operation, outputs in OUTPUTS.items()}
            for operation in (SELECT, SCHEDULE, FORWARD):
                call.enqueue(operation, prepared[operation])
            self.sets.append((call, prepared))
        torch.cuda.synchronize()

    def task(self, *operations):
        def run(i):
            call, prepared = self.sets[i % len(self.sets)]
            for operation in operations:
                call.enqueue(operation, prepared[operation])

        return run

    def pairs(self):
        """Selected visible (token, key) pairs, the mean over proxy heads and sets."""
        block, total = self.problem.block, 0
        for call, _ in self.sets:
            indices = call.outputs["block_indices"].long()
            position = torch.arange(indices.shape[1], device="cuda")[None, :, None]
            total += ((position - indices * block + 1).clamp(max=block) * (indices >= 0)).sum().item()
        return total / len(self.sets) / self.problem.heads[2]


def dense_tasks(heads, kv_heads, tokens, dim, sets):
    """cuDNN's causal attention through PyTorch, forward and backward."""
    qkv = []
    for seed in range(sets):
        g = torch.Generator(device="cuda").manual_seed(seed)
        qkv.append(
            [
                torch.randn(1, h, tokens, dim, generator=g, device="cuda", dtype=BF16, requires_grad=True)
                for h in (heads, kv_heads, kv_heads)
            ]
        )
    dout = torch.randn(1, heads, tokens, dim, device="cuda", dtype=BF16)
    last = {}

    def forward(i):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            last["inputs"] = qkv[i % sets]
            last["out"] = torch.nn.functional.scaled_dot_product_attention(
                *last["inputs"], is_causal=True, enable_gqa=True
            )

    def backward(_):
        torch.autograd.grad(last["out"], last["inputs"], dout)

    return forward, backward


def bench_ceilings(figures):
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    pairs = [[torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2)] for _ in range(3)]
    product = torch.empty(8192, 8192, device="cuda", dtype=BF16)
    ms = measure({"copy": lambda i: target.copy_(source), "gemm": lambda i: torch.mm(*pairs[i % 3], out=product)})
    figures["copy.tbps"] = (2 * source.numel() / ms["copy"] / 1e9, "TB/s", "device copy of 4 GiB, bytes read + written")
    figures["cublas.bf16.8192.tflops"] = (2 * 8192**3 / ms["gemm"] / 1e9, "TFLOP/s", "torch.mm, bf16 8192^3")


def bench_step_16k(figures):
    """The shape that flash-msa publishes: 16/2/4/1 heads, 16,384 tokens, k 16, with KL gradients."""
    steps = Steps((16, 2, 4, 1), 16384, 4)
    dense_forward, dense_backward = dense_tasks(16, 2, 16384, 128, 3)
    ms = measure(
        {
            "step": steps.task(SELECT, SCHEDULE, FORWARD, BACKWARD_WITH_PROXY),
            "select": steps.task(SELECT),
            "schedule": steps.task(SCHEDULE),
            "forward": steps.task(FORWARD),
            "backward": steps.task(BACKWARD_WITH_PROXY),
            "dense forward": dense_forward,
            "dense backward": dense_backward,
        }
    )
    shape = "16/2/4/1 heads, 16,384 tokens, D 128, k 16, bf16"
    figures["portable.step.ms.16k"] = (ms["step"], "ms", f"select, schedule, forward, backward with KL; {shape}")
    for name in ("select", "schedule", "forward"):
        figures[f"portable.{name}.ms.16k"] = (ms[name], "ms", shape)
    figures["portable.backward_with_proxy.ms.16k"] = (ms["backward"], "ms", shape)
    dense = ms["dense forward"] + ms["dense backward"]
    figures["cudnn.step.ms.16k"] = (dense, "ms", "cuDNN dense causal forward + backward, same heads and length")


def bench_m3_64k(figures):
    """MiniMax-M3 heads at 65,536 tokens."""
    steps = Steps((64, 4, 4, 1), 65536, 2)
    dense_forward, dense_backward = dense_tasks(64, 4, 16384, 128, 2)
    ms = measure(
        {
            "select": steps.task(SELECT),
            "schedule": steps.task(SCHEDULE),
            "forward": steps.task(FORWARD),
            "backward": steps.task(BACKWARD),
            "backward with proxy": steps.task(BACKWARD_WITH_PROXY),
            "dense forward": dense_forward,
            "dense backward": dense_backward,
        }
    )
    shape = "64/4/4/1 heads, 65,536 tokens, D 128, k 16, random selection, bf16"
    forward_flop = 2 * (128 + 128) * 64 * steps.pairs()
    scores_flop = 2 * 128 * 4 * (65536 * 65537 / 2)
    dense_flop = 2 * 16384**2 * 128 * 64
    tflops = "TFLOP/s"
    figures["portable.select.tflops.m3.64k"] = (scores_flop / ms["select"] / 1e9, tflops, f"scores and top-k; {shape}")
    figures["portable.schedule.ms.m3.64k"] = (ms["schedule"], "ms", shape)
    figures["portable.forward.tflops.m3.64k"] = (forward_flop / ms["forward"] / 1e9, tflops, shape)
    figures["portable.backward.tflops.m3.64k"] = (2.5 * forward_flop / ms["backward"] / 1e9, tflops, shape)
    figures["portable.backward_with_proxy.ms.m3.64k"] = (ms["backward with proxy"], "ms", shape)
    how = "cuDNN dense causal attention, 64/4 heads, 16,384 tokens"
    figures["cudnn.forward.tflops.m3.16k"] = (dense_flop / ms["dense forward"] / 1e9, tflops, how)
    figures["cudnn.backward.tflops.m3.16k"] = (2.5 * dense_flop / ms["dense backward"] / 1e9, tflops, how)


def commit():
    if "FLASHMSA_COMMIT" in os.environ:
        return os.environ["FLASHMSA_COMMIT"]
    git = subprocess.run(["git", "rev-parse", "--verify", "--quiet", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    card = torch.cuda.get_device_name(0)
    parser.add_argument("--out", default=str(ROOT / "results" / f"{card.split()[-1].lower()}.json"))
    out = parser.parse_args().out
    figures = {}
    for bench in (bench_ceilings, bench_step_16k, bench_m3_64k):
        bench(figures)
        torch.cuda.empty_cache()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    report = {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "card": card,
        "driver": driver.stdout.strip(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "figures": {n: {"value": round(v, 4), "unit": unit, "how": how} for n, (v, unit, how) in figures.items()},
    }
    os.makedirs(os.path.dirname(out), exist_ok=True)
    with open(out, "w") as file:
        json.dump(report, file, indent=2)
        file.write("\n")
    for name, (value, unit, _) in figures.items():
        print(f"{name:44} {value:10.3f} {unit}")
    print(f"{len(figures)} figures written to {out}")


if __name__ == "__main__":
    main()

"""Measures the library and the ceilings beside it, and writes results/<card>.json: for each part of the report its
commit, date, card and driver, and its figures with their units and how they were taken."""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
import traceback

import bench_backward
import bench_context_parallel
import bench_forward
import bench_million
import bench_proxy
import bench_python
import bench_select
import bench_step
import torch
from fmsa import BACKWARD, BACKWARD_WITH_PROXY, FORWARD, PORTABLE, ROOT, SCHEDULE, SELECT
from measure import GEMM_FLOP, M3, SMALL, Steps, dense_tasks, gemm_task, measure


def bench_ceilings(figures):
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    ms = measure({"copy": lambda i: target.copy_(source), "gemm": gemm_task()})
    figures["copy.tbps"] = (2 * source.numel() / ms["copy"] / 1e9, "TB/s", "device copy of 4 GiB, bytes read + written")
    figures["cublas.bf16.8192.tflops"] = (GEMM_FLOP / ms["gemm"] / 1e9, "TFLOP/s", "torch.mm, bf16 8192^3")


def bench_portable_16k(figures):
    """The shape that flash-msa publishes: 16/2/4/1 heads, 16,384 tokens, k 16, with KL gradients."""
    steps = Steps(SMALL, 16384, 4, flags=PORTABLE)
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


def bench_portable_64k(figures):
    """MiniMax-M3 heads at 65,536 tokens."""
    steps = Steps(M3, 65536, 2, flags=PORTABLE)
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


def bench_portable(figures):
    bench_portable_16k(figures)
    torch.cuda.empty_cache()
    bench_portable_64k(figures)


PARTS = {
    "ceilings": bench_ceilings,
    "portable": bench_portable,
    "select": bench_select.measure,
    "forward": bench_forward.measure_forward,
    "backward": bench_backward.measure_backward,
    "proxy": bench_proxy.bench_proxy,
    "step": bench_step.measure_steps,
    "million": bench_million.measure_million,
    "python": bench_python.measure,
    "context_parallel": bench_context_parallel.measure_context_parallel,
    "context_parallel_packs": bench_context_parallel.measure_packs,
    "context_parallel_long": bench_context_parallel.measure_long,
}


def commit():
    if "FLASHMSA_COMMIT" in os.environ:
        return os.environ["FLASHMSA_COMMIT"]
    git = subprocess.run(["git", "rev-parse", "--verify", "--quiet", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def environment():
    """What a part's figures depend on beside the code."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name(0),
        "driver": driver.stdout.strip(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    card = torch.cuda.get_device_name(0).split()[-1].lower()
    parser.add_argument("--out", default=str(ROOT / "results" / f"{card}.json"), help="the report")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure; other parts of the report stay")
    options = parser.parse_args()
    report = {}
    if os.path.exists(options.out):
        with open(options.out) as file:
            report = json.load(file)
    failed = []
    for part in options.parts.split(","):
        figures, start = {}, time.monotonic()
        try:
            PARTS[part](figures)
        except Exception:  # what was measured before it, and the other parts, are still worth having
            traceback.print_exc()
            failed.append(part)
        torch.cuda.empty_cache()
        values = {n: {"value": round(v, 4), "unit": unit, "how": how} for n, (v, unit, how) in figures.items()}
        report[part] = {**environment(), "figures": values}
        with open(options.out, "w") as file:
            json.dump({p: report[p] for p in PARTS if p in report}, file, indent=2)
            file.write("\n")
        print(f"{part}: {time.monotonic() - start:.0f} s")
        for name, (value, unit, _) in figures.items():
            print(f"  {name:44} {value:10.3f} {unit}", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

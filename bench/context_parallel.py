"""Context parallelism over the cards of one host, beside one of them; writes results/<card>x<ranks>.json.

    torchrun --nproc-per-node 2 bench/context_parallel.py [--tokens 262144] [--long 2097152] [--out FILE]

A step is one attention layer's forward and backward pass with the KL loss, MiniMax-M3 heads, bf16, random selection,
one document. Every rank also times its own part without communication, on keys that it has already: what a step takes
longer is the communication that nothing hid. One card's step is timed on rank 0 while the others wait. NVLink multicast
is left off (NCCL_NVLS_ENABLE=0)."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist

from flashmsa import flash_msa_varlen_func
from flashmsa.context_parallel import ContextParallel, attention

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADS, DIM, TOP_K = (64, 4, 4, 4, 1), 128, 16  # q, k, v, q_proxy, k_proxy
RUNS = 5


def leaves(rows: int, seed: int) -> list[torch.Tensor]:
    """q, k, v, q_proxy, k_proxy and dout."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        return torch.empty(rows, heads, DIM, device="cuda", dtype=torch.bfloat16).normal_(generator=g)

    proxies = [normal(HEADS[3]).requires_grad_(), normal(HEADS[4]).requires_grad_()]
    return [*[normal(heads).requires_grad_() for heads in HEADS[:3]], *proxies, normal(HEADS[0])]


def milliseconds(step: Callable[[], Any], runs: int, ranks: bool) -> float:
    """Median time of a step; with `ranks`, of the slowest rank, all of which begin together."""
    times = []
    for i in range(runs + 2):
        if ranks:
            dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        took = torch.tensor(begin.elapsed_time(end), device="cuda")
        if ranks:
            dist.all_reduce(took, dist.ReduceOp.MAX)
        if i >= 2:
            times.append(took.item())
    return statistics.median(times)


def spread_step(context: ContextParallel) -> Callable[[], None]:
    *x, dout = leaves(context.rows(), context.rank)
    grad_kl = torch.ones((), device="cuda")

    def step() -> None:
        out, kl = attention(*x, context, TOP_K, return_kl=True, kl_value=False)
        torch.autograd.grad([out, kl], x, [dout, grad_kl])

    return step


def own_step(context: ContextParallel) -> Callable[[], None]:
    """The same fragments over keys that lie here: the rank's step without communication."""
    layout = context._layout(torch.device("cuda"))
    q, _, _, q_proxy, _, dout = leaves(layout.count, context.rank)
    _, k, v, _, k_proxy, _ = leaves(layout.keys, context.rank)
    grad_kl, count = torch.ones((), device="cuda"), context.plan.total * HEADS[3]
    x = [q, k, v, q_proxy, k_proxy]

    def step() -> None:
        out, kl = flash_msa_varlen_func(
            *x, layout.q_bounds, layout.k_bounds, 0, layout.longest, TOP_K, kl_count=count, return_kl=True,
            kl_value=False,
        )  # fmt: skip
        torch.autograd.grad([out, kl], x, [dout, grad_kl])

    return step


def single_step(tokens: int) -> Callable[[], None]:
    *x, dout = leaves(tokens, 0)
    cu, grad_kl = torch.tensor([0, tokens], dtype=torch.int32, device="cuda"), torch.ones((), device="cuda")

    def step() -> None:
        out, kl = flash_msa_varlen_func(*x, cu, cu, tokens, tokens, TOP_K, return_kl=True, kl_value=False)
        torch.autograd.grad([out, kl], x, [dout, grad_kl])

    return step


def measure(tokens: int, long_tokens: int) -> dict[str, tuple[float, str, str]]:
    """name -> (value, unit, how), on rank 0; the other ranks measure with it."""
    world, figures = dist.get_world_size(), {}
    label, shape = f"m3.{tokens >> 10}k.{world}gpu", f"64/4/4/1 heads, {tokens:,} tokens, D 128, k 16, bf16"
    context = ContextParallel([0, tokens])
    spread = milliseconds(spread_step(context), RUNS, True)
    torch.cuda.empty_cache()
    own = milliseconds(own_step(context), RUNS, True)
    torch.cuda.empty_cache()
    single = milliseconds(single_step(tokens), RUNS, False) if context.rank == 0 else 0.0
    dist.barrier()
    torch.cuda.empty_cache()
    figures[f"cp.step.ms.{label}"] = (spread, "ms", f"forward and backward with KL, slowest rank; {shape}")
    figures[f"cp.single.ms.{label}"] = (single, "ms", f"the same on one card; {shape}")
    figures[f"cp.speedup.{label}"] = (single / spread, "x", "cp.single.ms over cp.step.ms")
    exposed = (spread - own) / spread
    figures[f"cp.exposed.{label}"] = (exposed, "", "part of a step beyond the slowest rank's own compute")
    if long_tokens:
        torch.cuda.reset_peak_memory_stats()
        ms = milliseconds(spread_step(ContextParallel([0, long_tokens], keep_keys=True)), 1, True)
        peak = torch.tensor(torch.cuda.max_memory_allocated() / (1 << 30), device="cuda")
        peaks = [torch.empty_like(peak) for _ in range(world)]
        dist.all_gather(peaks, peak)
        long_label = f"m3.{long_tokens >> 20}m.{world}gpu"
        figures[f"cp.step.ms.{long_label}"] = (ms, "ms", f"forward and backward with KL; {long_tokens:,} tokens")
        for rank, value in enumerate(peaks):
            name = f"cp.peak_gib.rank{rank}.{long_label}"
            figures[name] = (value.item(), "GiB", "most memory allocated by PyTorch, inputs included")
    return figures


def git_commit() -> str:
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return os.environ.get("FLASHMSA_COMMIT") or git.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--long", type=int, default=2097152, help="tokens of the long step; 0 for none")
    parser.add_argument("--out", help="default results/<card>x<ranks>.json")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    figures = measure(arguments.tokens, arguments.long)
    if dist.get_rank() == 0:
        card = torch.cuda.get_device_name()
        report = {
            "commit": git_commit(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "card": f"{dist.get_world_size()} x {card}",
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "figures": {n: {"value": round(v, 4), "unit": unit, "how": how} for n, (v, unit, how) in figures.items()},
        }
        name = f"{card.split()[-1].lower()}x{dist.get_world_size()}.json"
        out = pathlib.Path(arguments.out) if arguments.out else ROOT / "results" / name
        out.write_text(json.dumps(report, indent=2) + "\n")
        for figure, (value, unit, _) in figures.items():
            print(f"{figure:44} {value:10.4f} {unit}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Context parallelism over the cards of one host, beside one of them; writes results/<card>x<ranks>.json.

    torchrun --nproc-per-node 2 bench/context_parallel.py [--tokens 262144] [--long 2097152] [--out FILE]

A step is one attention layer's forward and backward pass with the KL loss, MiniMax-M3 heads, bf16, random selection,
one document. Besides it each rank times its own part on keys that lie there already, and the exchange alone: what a
step takes longer than the slowest rank's part is what nothing hid of the exchange. One card's step is timed on rank 0
while the others wait. All take turns of about a second, since a card that has just begun runs at higher clocks. NVLink
multicast is left off (NCCL_NVLS_ENABLE=0)."""

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
TURNS, RUNS = 3, 8  # of a turn's runs the second half counts


def leaves(rows: int, seed: int) -> list[torch.Tensor]:
    """q, k, v, q_proxy, k_proxy and dout."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        return torch.empty(rows, heads, DIM, device="cuda", dtype=torch.bfloat16).normal_(generator=g)

    proxies = [normal(HEADS[3]).requires_grad_(), normal(HEADS[4]).requires_grad_()]
    return [*[normal(heads).requires_grad_() for heads in HEADS[:3]], *proxies, normal(HEADS[0])]


def times(step: Callable[[], Any], runs: int, group: bool) -> list[float]:
    """Milliseconds of each run; with `group`, every rank's runs begin together."""
    events = []
    for _ in range(runs):
        if group:
            dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        events.append((begin, end))
    return [begin.elapsed_time(end) for begin, end in events]


def by_rank(values: list[float]) -> list[list[float]]:
    """Every rank's values."""
    mine = torch.tensor(values, device="cuda")
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [x.tolist() for x in every]


def spread_step(context: ContextParallel) -> Callable[[], None]:
    *x, dout = leaves(context.rows(), context.rank)
    grad_kl = torch.ones((), device="cuda")

    def step() -> None:
        out, kl = attention(*x, context, TOP_K, return_kl=True, kl_value=False)
        torch.autograd.grad([out, kl], x, [dout, grad_kl])

    return step


def exchange_step(context: ContextParallel) -> Callable[[], None]:
    """Keys gathered and put in order, their gradients in fp32 sent back and summed."""
    _, k, v, _, k_proxy, _ = leaves(context.rows(), context.rank)
    layout, x = context._layout(torch.device("cuda")), (k_proxy, k, v)
    grads = [torch.randn(layout.keys, t.shape[1], DIM, device="cuda") for t in x]

    def step() -> None:
        keys = context.gather(k, v, k_proxy)
        carriers = [keys._arrive(trip, t)[1] for trip, t in enumerate(x)]
        torch.autograd.grad(carriers, x, grads)

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


def measure(tokens: int) -> dict[str, tuple[float, str, str]]:
    """name -> (value, unit, how)."""
    world = dist.get_world_size()
    label, shape = f"m3.{tokens >> 10}k.{world}gpu", f"64/4/4/1 heads, {tokens:,} tokens, D 128, k 16, bf16"
    context = ContextParallel([0, tokens])
    narrow = ContextParallel([0, tokens], fp32_gradients=False)
    steps = {"spread": spread_step(context), "own": own_step(context), "exchange": exchange_step(context)}
    steps |= {"narrow": spread_step(narrow), "single": single_step(tokens) if context.rank == 0 else None}
    taken: dict[str, list[list[float]]] = {name: [[] for _ in range(world)] for name in steps}
    for _ in range(TURNS):
        for name, step in steps.items():
            mine = times(step, RUNS, name != "single") if step else [0.0] * RUNS
            for rank, values in enumerate(by_rank(mine)):
                taken[name][rank] += values[RUNS // 2 :]
    slowest = {n: statistics.median(map(max, zip(*values, strict=True))) for n, values in taken.items()}
    own = [statistics.median(values) for values in taken["own"]]
    step, exchange, exposed = slowest["spread"], slowest["exchange"], slowest["spread"] - slowest["own"]
    passes = "forward and backward with KL"
    return {
        f"cp.step.ms.{label}": (step, "ms", f"{passes}, slowest rank; {shape}"),
        f"cp.single.ms.{label}": (slowest["single"], "ms", f"the same on one card; {shape}"),
        f"cp.speedup.{label}": (slowest["single"] / step, "x", "cp.single.ms over cp.step.ms"),
        f"cp.own.ms.{label}": (slowest["own"], "ms", "slowest rank's part on keys that lie there, no exchange"),
        f"cp.own.max_over_mean.{label}": (max(own) / statistics.mean(own), "x", "slowest rank's part over the mean"),
        f"cp.exchange.ms.{label}": (exchange, "ms", "keys there, gradients back in fp32, put in order; no attention"),
        f"cp.exposed.ms.{label}": (exposed, "ms", "cp.step.ms less cp.own.ms"),
        f"cp.exposed.{label}": (exposed / step, "", "cp.exposed.ms over cp.step.ms"),
        f"cp.exposed_of_exchange.{label}": (exposed / exchange, "", "cp.exposed.ms over cp.exchange.ms"),
        f"cp.step_bf16_sums.ms.{label}": (slowest["narrow"], "ms", f"{passes}, fp32_gradients=False; {shape}"),
    }


def measure_long(tokens: int) -> dict[str, tuple[float, str, str]]:
    """One step, after one that is not counted, of a document that no card could hold; each card's peak memory."""
    world = dist.get_world_size()
    label, context = f"m3.{tokens >> 20}m.{world}gpu", ContextParallel([0, tokens])
    torch.cuda.reset_peak_memory_stats()
    every = by_rank([*times(spread_step(context), 2, True), torch.cuda.max_memory_allocated() / (1 << 30)])
    how = f"forward and backward with KL, slowest rank; 64/4/4/1 heads, {tokens:,} tokens, D 128, k 16, bf16"
    figures = {f"cp.step.ms.{label}": (max(values[1] for values in every), "ms", how)}
    for rank, values in enumerate(every):
        name = f"cp.peak_gib.rank{rank}.{label}"
        figures[name] = (values[2], "GiB", "most memory allocated by PyTorch, inputs included")
    return figures


def git_commit() -> str:
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return os.environ.get("FLASHMSA_COMMIT") or git.stdout.strip() or "unknown"


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--long", type=int, default=2097152, help="tokens of the long step; 0 for none")
    parser.add_argument("--out", help="default results/<card>x<ranks>.json")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    card = torch.cuda.get_device_name()
    name = f"{card.split()[-1].lower()}x{dist.get_world_size()}.json"
    out, report = pathlib.Path(arguments.out) if arguments.out else ROOT / "results" / name, {}
    parts = {"context_parallel": (measure, arguments.tokens)}
    if arguments.long:
        parts["context_parallel_long"] = (measure_long, arguments.long)
    for part, (function, tokens) in parts.items():
        torch.cuda.empty_cache()
        figures = function(tokens)
        if dist.get_rank() > 0:
            continue
        report[part] = {
            "commit": git_commit(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "card": f"{dist.get_world_size()} x {card}",
            "driver": driver(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "figures": {n: {"value": round(v, 4), "unit": unit, "how": how} for n, (v, unit, how) in figures.items()},
        }
        out.write_text(json.dumps(report, indent=2) + "\n")
        for figure, (value, unit, _) in figures.items():
            print(f"{figure:44} {value:10.4f} {unit}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

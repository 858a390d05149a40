"""What context parallelism costs in compute, on one card: every rank's fragments are run one rank after the other, and
beside them the whole pack at once. Nothing travels here; each rank has the gathered keys that it would have. Then two
ranks' whole steps through PyTorch, with collectives that carry nothing: all that an exchange costs but the wire.

Needs the package on PYTHONPATH (or installed) and a card; FLASHMSA_LIBRARY names the library. `measure_balance` needs
no card, the rest about 100 GiB of it. Run as a program, this prints each rank's operations too."""

import contextlib
import json
import statistics
import sys

import torch
import torch.distributed as dist
from bench_million import STEP, OneWorkspace
from fmsa import FP32_KV_GRADS, ROOT, Problem
from measure import BF16, M3, OUTPUTS, steady
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashmsa import flash_msa_varlen_func
from flashmsa._cp_exchange import Layout
from flashmsa.context_parallel import ContextParallel, attention, make_plan

DIM, TOP_K = 128, 16
LOSS_IS_USED = {"return_kl": True, "kl_value": False}
NAMES = ("select", "schedule", "forward", "backward_with_proxy")
PACKS = {n: torch.tensor([0, *lengths]).cumsum(0).tolist()
         for n, lengths in json.loads((ROOT / "tests" / "packs_192k.json").read_text())["packs"].items()}  # fmt: skip


def measure_balance(figures):
    """Modelled work, by the plan alone."""
    for ranks in (2, 4, 8, 16):
        plans = [make_plan(cu, ranks) for cu in PACKS.values()]
        how = f"largest rank's modelled work over the mean, the worst of {len(plans)} real packs; {ranks} ranks"
        figures[f"cp.balance.packs.{ranks}"] = (max(plan.imbalance for plan in plans), "x", how)


def normal_tensors(seed):
    """Makes tensors [rows, heads, DIM]."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    return lambda rows, heads: torch.empty(rows, heads, DIM, device="cuda", dtype=BF16).normal_(generator=g)


def rank_ms(plan, rank, runs=2):
    """Median milliseconds of a rank's step, and of each of its operations, in tensors of its own."""
    layout = Layout(plan, rank, torch.device("cpu"))
    fragments = torch.cat([layout.q_bounds, layout.k_bounds]).t().tolist()
    hq, hkv, hp, hpk = M3
    normal = normal_tensors(rank)
    x = {"q": normal(layout.count, hq), "q_proxy": normal(layout.count, hp), "dout": normal(layout.count, hq)}
    x |= {"k": normal(layout.keys, hkv), "v": normal(layout.keys, hkv), "k_proxy": normal(layout.keys, hpk)}
    x["grad_kl"] = torch.ones(1, device="cuda")
    problem = Problem(
        M3, fragments, BF16, top_k=TOP_K, flags=FP32_KV_GRADS if plan.world > 1 else 0, total_q=layout.count,
        total_k=layout.keys, max_seqlen_k=layout.longest, kl_count=plan.total * hp,
    )  # fmt: skip
    call = OneWorkspace(problem, x)
    prepared = [(operation, call.prepare(operation, OUTPUTS[operation])) for operation in STEP]
    steps, parts = [], {name: [] for name in NAMES}
    for _ in range(runs + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(STEP) + 1)]
        events[0].record()
        for (operation, what), event in zip(prepared, events[1:], strict=True):
            call.enqueue(operation, what)
            event.record()
        torch.cuda.synchronize()
        steps.append(events[0].elapsed_time(events[-1]))
        for name, begin, end in zip(NAMES, events, events[1:], strict=False):
            parts[name].append(begin.elapsed_time(end))
    assert all(buffer.intact() for buffer in call.buffers.values())
    return statistics.median(steps[1:]), {name: statistics.median(times[1:]) for name, times in parts.items()}


def compare(figures, label, what, cu, ranks):
    """Figures of one pack on a number of ranks; the single-card run is the plan for one rank."""
    ms, parts = [], []
    for rank in range(ranks):
        torch.cuda.empty_cache()
        step, operations = rank_ms(make_plan(cu, ranks), rank)
        ms.append(step)
        parts.append(operations)
    torch.cuda.empty_cache()
    single, operations = rank_ms(make_plan(cu, 1), 0)
    mean, shape = sum(ms) / ranks, f"{what}, 64/4/4/1 heads, D 128, k 16, bf16, random selection, {ranks} ranks in turn"
    figures[f"cp.rank_time.max_over_mean.{label}"] = (max(ms) / mean, "x", f"slowest rank over the mean; {shape}")
    figures[f"cp.sum_over_single.{label}"] = (sum(ms) / single, "x", f"all ranks' steps over one card's; {shape}")
    return ms, parts, single, operations


def torch_step(attend, rows, seed):
    """Forward and backward pass with KL of attend(q, k, v, q_proxy, k_proxy), as a task."""
    hq, hkv, hp, hpk = M3
    normal = normal_tensors(seed)
    x = [normal(rows, heads).requires_grad_() for heads in (hq, hkv, hkv, hp, hpk)]
    dout, grad_kl = normal(rows, hq), torch.ones((), device="cuda")

    def task(_):
        out, kl = attend(*x)
        torch.autograd.grad([out, kl], x, [dout, grad_kl])

    return task


@contextlib.contextmanager
def silent_group(ranks):
    """A process group of this process alone, whose collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_task(tokens, rank):
    """A rank's step, exchange included, in a silent group."""
    context = ContextParallel([0, tokens], agree=False)
    context.rank = rank
    return torch_step(lambda *x: attention(*x, context, TOP_K, **LOSS_IS_USED), context.rows(), rank)


def measure_without_wire(figures, tokens=262144, ranks=2):
    """Each rank's step where collectives return at once, beside one card's. The most that the cards could reach."""
    cu = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    single = torch_step(lambda *x: flash_msa_varlen_func(*x, cu, cu, 0, 0, TOP_K, **LOSS_IS_USED), tokens, 0)
    with silent_group(ranks):
        ms = steady({"single": single, **{rank: rank_task(tokens, rank) for rank in range(ranks)}}, seconds=0.5)
    label, one = f"m3.{tokens >> 10}k.{ranks}", ms.pop("single")
    shape = f"one document of {tokens:,} tokens, 64/4/4/1 heads, D 128, k 16, bf16, random selection"
    figures[f"cp.single.ms.{label}"] = (one, "ms", f"forward and backward with KL through PyTorch; {shape}")
    how = f"slowest of {ranks} ranks in turn, collectives carry nothing; {shape}"
    figures[f"cp.step_without_wire.ms.{label}"] = (max(ms.values()), "ms", how)
    how = "cp.single.ms over cp.step_without_wire.ms"
    figures[f"cp.speedup_without_wire.{label}"] = (one / max(ms.values()), "x", how)


def measure_long(figures, tokens=1 << 21, ranks=2):
    """Memory and time of each rank's step of a document that no single card could hold. Collectives carry nothing."""
    label, ms = f"m3.{tokens >> 20}m.{ranks}", []
    how = f"PyTorch's most memory allocated, inputs included; {tokens:,} tokens, 64/4/4/1 heads, D 128, k 16, bf16"
    for rank in range(ranks):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with silent_group(ranks):
            task = rank_task(tokens, rank)
            for _ in range(2):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                task(0)
                end.record()
            torch.cuda.synchronize()
        ms.append(begin.elapsed_time(end))
        figures[f"cp.peak_gib.rank{rank}.{label}"] = (torch.cuda.max_memory_allocated() / (1 << 30), "GiB", how)
    how = f"slowest of {ranks} ranks in turn, collectives carry nothing; forward and backward with KL"
    figures[f"cp.step_without_wire.ms.{label}"] = (max(ms), "ms", how)


def measure_context_parallel(figures, shown=lambda *_: None):
    """The plan's balance, a long document on 8 ranks, and two ranks' steps but for the wire."""
    measure_balance(figures)
    cu = [0, 1 << 20]
    shown("m3.1m.8", cu, compare(figures, "m3.1m.8", "one document of 1,048,576 tokens", cu, 8))
    measure_without_wire(figures)


def measure_packs(figures, shown=lambda *_: None):
    """The real packs on 8 ranks."""
    for n, cu in PACKS.items():
        label = f"m3.pack{n}.8"
        shown(label, cu, compare(figures, label, f"real pack {n} of 196,608 tokens", cu, 8))


def show(label, cu, result):
    ms, parts, single, operations = result
    plan = make_plan(cu, len(ms))
    print(f"{label}: single {single:.2f} ms", {name: round(t, 2) for name, t in operations.items()})
    for rank, (t, part) in enumerate(zip(ms, parts, strict=True)):
        pieces = [(p.document, p.begin, p.end) for p in plan.pieces[rank]][:3]
        print(f"  rank {rank}: {t:8.2f} ms", {n: round(x, 2) for n, x in part.items()}, plan.rows[rank], "rows", pieces)
    sys.stdout.flush()


if __name__ == "__main__":
    figures = {}
    measure_context_parallel(figures, show)
    measure_packs(figures, show)
    measure_long(figures)
    for name, (value, unit, _) in figures.items():
        print(f"{name:44} {value:10.4f} {unit}")

"""How the GPU benchmarks measure, and what they measure with: timing, inputs, selections, cuDNN and cuBLAS beside.

Every figure is taken in steady state. Inputs rotate over more than twice the L2 cache, and each input set has a
selection of its own. Useful work is counted by the formulas in docs/algorithm.md, whatever the kernels really do."""

import statistics
import time

import torch
from fmsa import BACKWARD, BACKWARD_WITH_PROXY, FORWARD, SCHEDULE, SELECT, Call, Problem, documents, make_inputs
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
M3 = (64, 4, 4, 1)  # Hq, Hkv, Hp, Hpk of MiniMax-M3
SMALL = (16, 2, 4, 1)  # the heads that flash-msa publishes figures for
GEMM_FLOP = 2 * 8192**3


def measure(tasks):
    """Median milliseconds of each task, a function of the iteration's number; all of them in turn, one run each,
    so that they share clocks and power."""
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


def steady(tasks, rounds=3, seconds=0.25):
    """Median milliseconds of each task when it runs by itself for a while, as in training: the card is bound by power
    and lowers its clock for some kernels more than for others. Tasks take turns of `seconds`; the first half of a turn
    is not counted."""
    times = {name: [] for name in tasks}
    for r in range(rounds):
        for name in tasks if r % 2 == 0 else reversed(tasks):
            events, start, i = [], time.monotonic(), 0
            while time.monotonic() - start < seconds or i < 4:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                tasks[name](i)
                end.record()
                events.append((begin, end))
                i += 1
                if i > 2:
                    events[-3][1].synchronize()
            torch.cuda.synchronize()
            times[name] += [begin.elapsed_time(end) for begin, end in events[i // 2 :]]
    return {name: statistics.median(t) for name, t in times.items()}


def gemm_task():
    """cuBLAS, bf16 8192^3: GEMM_FLOP."""
    pairs = [[torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2)] for _ in range(3)]
    product = torch.empty(8192, 8192, device="cuda", dtype=BF16)
    return lambda i: torch.mm(*pairs[i % 3], out=product)


def selection(kind, proxy_heads, tokens, top_k, block=128, seed=0):
    """Block indices [Hp, T, k] of one document, ascending, -1 behind the last:
    recent   the newest k blocks
    agree32  32 neighbouring tokens share k - 1 random blocks beside their own
    trained  as trained models select: the token's own block, block 0 for 99 % of tokens, four blocks that 32
             neighbouring tokens share, the rest random"""
    g = torch.Generator(device="cuda").manual_seed(seed)
    local = torch.arange(tokens, device="cuda", dtype=torch.int32) // block
    blocks = (tokens + block - 1) // block

    def rand(*shape):
        return torch.rand(*shape, generator=g, device="cuda")

    def one_head():
        if kind == "recent":
            preference = torch.arange(blocks, device="cuda").expand(tokens, blocks).float()
        else:
            preference = rand((tokens + 31) // 32, blocks).repeat_interleave(32, 0)[:tokens]
        if kind == "trained":
            number = torch.arange(blocks, device="cuda")
            shared = preference.masked_fill((number >= local[:, None]) | (number == 0), -1).topk(min(4, blocks), 1)
            preference = rand(tokens, blocks)
            preference.scatter_add_(1, shared.indices, torch.where(shared.values >= 0, 1.0, 0.0))
            preference[:, 0] = torch.where(rand(tokens) < 0.99, 3.0, preference[:, 0])
        preference = preference.masked_fill(torch.arange(blocks, device="cuda") > local[:, None], -1)
        preference.scatter_(1, local[:, None].long(), float("inf"))
        best = preference.topk(min(top_k, blocks), 1)
        chosen = best.indices.masked_fill(best.values < 0, blocks).sort(1).values
        chosen = chosen.masked_fill(chosen == blocks, -1).int()
        return torch.nn.functional.pad(chosen, (0, top_k - chosen.shape[1]), value=-1)

    return torch.stack([one_head() for _ in range(proxy_heads)])


class Steps:
    """Calls over rotating input sets, with everything prepared but nothing enqueued. kind: "random" takes what the
    random proxies select; see selection() for the others."""

    def __init__(self, heads, tokens, sets, kind="random", operations=tuple(OUTPUTS), lengths=None, **options):
        self.problem = Problem(heads, documents(lengths or [tokens]), BF16, top_k=16, **options)
        self.sets = []
        for seed in range(sets):
            inputs = make_inputs(self.problem, seed=seed)
            if kind != "random":
                inputs["block_indices"] = selection(kind, heads[2], tokens, 16, seed=seed)
            call = Call(self.problem, inputs)
            prepared = {}
            for operation in operations:
                if operation == SELECT and (self.problem.dense or kind != "random"):
                    continue
                if operation == SCHEDULE and self.problem.dense:
                    continue
                prepared[operation] = call.prepare(operation, OUTPUTS[operation])
                if operation in (SELECT, SCHEDULE, FORWARD):
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
        position = torch.cat([torch.arange(q1 - q0, device="cuda") for q0, q1, _, _ in self.problem.fragments])
        if self.problem.dense:
            return (position + 1).sum().item()
        position = position[None, :, None]
        for call, _ in self.sets:
            indices = {**call.outputs, **call.inputs}["block_indices"].long()
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

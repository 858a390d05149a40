"""One MiniMax-M3 layer at 1,048,576 tokens on one card: the time of a step, the memory it takes, and its values on
sampled rows against fp64: the first, the last, and around every border where an element offset passes a multiple of
2^31."""

import ctypes
import math
import statistics

import torch
from fmsa import (
    BACKWARD_WITH_PROXY,
    FORWARD,
    SCHEDULE,
    SELECT,
    SELECT_FP8,
    Call,
    Problem,
    check,
    documents,
    lib,
)
from measure import BF16, M3, OUTPUTS

TOKENS, BLOCK, DIM, TOP_K = 1 << 20, 128, 128, 16
STEP = (SELECT, SCHEDULE, FORWARD, BACKWARD_WITH_PROXY)
SCALE = DIM**-0.5
ROWS = sorted(
    {0, 1, 127, 128, TOKENS - 1} | {r + d for r in (TOKENS // 4, TOKENS // 2, TOKENS // 4 * 3) for d in (-1, 0)}
)


def inputs():
    g = torch.Generator(device="cuda").manual_seed(0)
    hq, hkv, hp, hpk = M3

    def normal(heads):
        x = torch.empty(TOKENS, heads, DIM, device="cuda", dtype=BF16)
        return x.normal_(generator=g)

    x = {"q": normal(hq), "k": normal(hkv), "v": normal(hkv), "q_proxy": normal(hp), "k_proxy": normal(hpk)}
    return {**x, "dout": normal(hq), "grad_kl": torch.ones(1, device="cuda")}


def keys_of(indices, rows):
    """[rows, k * BLOCK] key numbers of one proxy head's rows, and which of them are visible."""
    blocks = indices[rows].long()
    keys = blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device="cuda")
    seen = (blocks[:, :, None] >= 0) & (keys <= rows[:, None, None])
    return keys.clamp(min=0).flatten(1), seen.flatten(1)


def attention(x, outputs, head, rows):
    """fp64 probabilities, dS, output, LSE and keys of one main head's rows."""
    kv, proxy = head // (M3[0] // M3[1]), head // (M3[0] // M3[2])
    keys, seen = keys_of(outputs["block_indices"][proxy], rows)
    k, v = x["k"][keys, kv].double(), x["v"][keys, kv].double()
    q, dout = x["q"][rows, head].double(), x["dout"][rows, head].double()
    s = (torch.einsum("rd,rkd->rk", q, k) * SCALE).masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, 1)
    a = torch.exp(s - lse[:, None])
    out = torch.einsum("rk,rkd->rd", a, v)
    ds = a * (torch.einsum("rd,rkd->rk", dout, v) - (dout * out).sum(1, keepdim=True))
    return a, ds, out, lse, keys, k


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def proxy_terms(x, outputs, proxy, rows):
    """fp64 r - w of one proxy head's rows, and their keys."""
    per_proxy = M3[0] // M3[2]
    w = sum(attention(x, outputs, proxy * per_proxy + i, rows)[0] for i in range(per_proxy)) / per_proxy
    keys, seen = keys_of(outputs["block_indices"][proxy], rows)
    kp = x["k_proxy"][keys, 0].double()
    s = torch.einsum("rd,rkd->rk", x["q_proxy"][rows, proxy].double(), kp) * SCALE
    return s.masked_fill(~seen, -math.inf).softmax(1) - w, keys, kp


def check_rows(x, outputs):
    """Largest relative error of out, dq and dq_proxy over the sampled rows, and of lse (absolute)."""
    rows = torch.tensor(ROWS, device="cuda")
    worst = dict.fromkeys(("out", "lse", "dq", "dq_proxy"), 0.0)
    for head in range(0, M3[0], 5):
        _, ds, out, lse, _, k = attention(x, outputs, head, rows)
        dq = torch.einsum("rk,rkd->rd", ds, k) * SCALE
        worst["lse"] = max(worst["lse"], (outputs["lse"][head, rows].double() - lse).abs().max().item())
        for i, row in enumerate(ROWS):
            worst["out"] = max(worst["out"], relative(outputs["out"][row, head], out[i]))
            if row > 0:  # the only key of row 0 has probability 1: its dq is rounding
                worst["dq"] = max(worst["dq"], relative(outputs["dq"][row, head], dq[i]))
    for proxy in range(M3[2]):
        ds, _, kp = proxy_terms(x, outputs, proxy, rows)
        want = torch.einsum("rk,rkd->rd", ds, kp) * SCALE / (TOKENS * M3[2])
        for i, row in enumerate(ROWS):
            if row > 0:
                worst["dq_proxy"] = max(worst["dq_proxy"], relative(outputs["dq_proxy"][row, proxy], want[i]))
    return worst


def check_block(x, outputs, block):
    """Relative errors of dk, dv (key head 1) and dk_proxy of one key block, from all rows that chose it."""
    own = torch.arange(block * BLOCK, (block + 1) * BLOCK, device="cuda")
    dk, dv, dkp = (torch.zeros(BLOCK, DIM, dtype=torch.float64, device="cuda") for _ in range(3))

    def add(total, value, keys, vectors):
        inside = (keys >= own[0]) & (keys <= own[-1])
        row, column = inside.nonzero(as_tuple=True)
        total.index_add_(0, keys[row, column] - own[0], value[row, column, None] * vectors[row])

    for proxy in range(M3[2]):
        chosen = (outputs["block_indices"][proxy] == block).any(1).nonzero()[:, 0]
        for rows in chosen.split(128):
            ds, keys, _ = proxy_terms(x, outputs, proxy, rows)
            add(dkp, ds * SCALE / (TOKENS * M3[2]), keys, x["q_proxy"][rows, proxy].double())
            if proxy == 1:
                for head in range(16, 32):
                    a, ds, _, _, keys, _ = attention(x, outputs, head, rows)
                    add(dk, ds * SCALE, keys, x["q"][rows, head].double())
                    add(dv, a, keys, x["dout"][rows, head].double())
    return {
        "dk": relative(outputs["dk"][own, 1], dk),
        "dv": relative(outputs["dv"][own, 1], dv),
        "dk_proxy": relative(outputs["dk_proxy"][own, 0], dkp),
    }


class OneWorkspace(Call):
    """All operations take turns with one workspace, as large as the largest asks for."""

    def __init__(self, problem, x):
        super().__init__(problem, x)
        config, size, self.most = problem.config(), ctypes.c_size_t(), 0
        for operation in STEP:
            check(lib.fmsa_workspace_bytes(ctypes.byref(config), operation, ctypes.byref(size)))
            self.most = max(self.most, size.value)

    def buffer(self, name, size):
        if name.startswith("workspace"):
            return super().buffer("workspace", self.most)
        return super().buffer(name, size)


def step_ms(x, flags, runs=2):
    """Median milliseconds of a step, and the call with its outputs."""
    problem = Problem(M3, documents([TOKENS]), BF16, top_k=TOP_K, flags=flags)
    call = OneWorkspace(problem, x)
    prepared = [(operation, call.prepare(operation, OUTPUTS[operation])) for operation in STEP]
    times = []
    for _ in range(runs + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for operation, what in prepared:
            call.enqueue(operation, what)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    assert all(buffer.intact() for buffer in call.buffers.values())
    return statistics.median(times[1:]), call


def measure_million(figures):
    x = inputs()
    torch.cuda.synchronize()
    ms, call = step_ms(x, 0)
    peak = torch.cuda.max_memory_allocated() / (1 << 30)
    shape = f"64/4/4/1 heads, {TOKENS:,} tokens, D 128, k 16, bf16, random selection"
    figures["step.ms.m3.1m"] = (ms, "ms", f"select, schedule, forward, backward with KL; {shape}")
    figures["step.peak_gib.m3.1m"] = (peak, "GiB", f"all tensors, schedule and workspace; {shape}")
    errors = check_rows(x, call.outputs)
    for block in (0, TOKENS // BLOCK // 2, TOKENS // BLOCK - 1):
        for name, error in check_block(x, call.outputs, block).items():
            errors[name] = max(errors.get(name, 0.0), error)
    how = f"largest relative error of a sampled row against fp64 (of a key block for dk, dv, dk_proxy); {shape}"
    for name, error in errors.items():
        figures[f"step.error.{name}.m3.1m"] = (error, "", how)
        assert error < 2e-2, f"{name} is off by {error}"
    del call
    torch.cuda.empty_cache()
    ms = step_ms(x, SELECT_FP8)[0]
    figures["step.ms.m3.1m.fp8"] = (ms, "ms", f"the same with FMSA_FLAG_SELECT_FP8; {shape}")


if __name__ == "__main__":
    figures = {}
    measure_million(figures)
    for name, (value, unit, _) in figures.items():
        print(f"{name:36} {value:10.4f} {unit}")

"""What the proxy loss costs: in the sparse backward, in dense mode, alone; and the scratch of dense mode."""

import ctypes

import torch
from fmsa import BACKWARD, BACKWARD_WITH_PROXY, FORWARD, PROXY_LOSS, Problem, check, documents, lib
from measure import BF16, M3, Steps, steady


def prepare_kl_alone(call):
    """The proxy loss without gradients: those of other operations are out of sight."""
    gradients = {name: call.outputs.pop(name) for name in ("dq_proxy", "dk_proxy")}
    prepared = call.prepare(PROXY_LOSS, ["kl"])
    call.outputs.update(gradients)
    return prepared


def bench_sparse(figures):
    """M3 heads at 65,536 tokens, random selection."""
    steps = Steps(M3, 65536, 2)
    alone = [prepare_kl_alone(call) for call, _ in steps.sets]
    ms = steady(
        {
            "without": steps.task(BACKWARD),
            "with": steps.task(BACKWARD_WITH_PROXY),
            "alone": lambda i: steps.sets[i % 2][0].enqueue(PROXY_LOSS, alone[i % 2]),
        }
    )
    shape = "64/4/4/1 heads, 65,536 tokens, D 128, k 16, random selection, bf16"
    figures["backward.kl_overhead.m3.64k"] = (ms["with"] / ms["without"], "x", f"backward with proxy loss; {shape}")
    figures["proxy_loss.kl_only.ms.m3.64k"] = (ms["alone"], "ms", f"the KL value without a backward pass; {shape}")


def bench_dense(figures):
    """M3 heads at 32,768 tokens."""
    steps = Steps(M3, 32768, 2, operations=(FORWARD, BACKWARD, BACKWARD_WITH_PROXY), dense=True)
    tasks = {"without": steps.task(FORWARD, BACKWARD), "with": steps.task(FORWARD, BACKWARD_WITH_PROXY)}
    ms = steady(tasks, seconds=0.5)
    what = "dense forward + backward with proxy loss over without; 64/4/4/1 heads, 32,768 tokens, D 128, bf16"
    figures["dense.kl_overhead.m3.32k"] = (ms["with"] / ms["without"], "x", what)


def scratch_bytes(problem, operation):
    """What the operation asks for: from shapes alone, so nothing is run."""
    config, size = problem.config(), ctypes.c_size_t()
    check(lib.fmsa_workspace_bytes(ctypes.byref(config), operation, ctypes.byref(size)))
    return size.value


def bench_scratch(figures):
    """Scratch of the dense operations."""
    for tokens, name in ((32768, "32k"), (65536, "64k"), (131072, "128k")):
        problem = Problem(M3, documents([tokens]), BF16, dense=True)
        most = max(scratch_bytes(problem, o) for o in (FORWARD, BACKWARD, BACKWARD_WITH_PROXY, PROXY_LOSS))
        what = f"the most scratch of forward, backward and proxy loss, dense mode; 64/4/4/1 heads, {tokens:,} tokens"
        figures[f"dense.scratch_gib.m3.{name}"] = (most / 2**30, "GiB", what)


def bench_proxy(figures):
    bench_sparse(figures)
    torch.cuda.empty_cache()
    bench_dense(figures)
    torch.cuda.empty_cache()
    bench_scratch(figures)

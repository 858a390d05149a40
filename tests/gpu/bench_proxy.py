"""What the proxy loss costs: in the sparse backward, in dense mode, alone; and the scratch of dense mode."""

import torch
from fmsa import BACKWARD, BACKWARD_WITH_PROXY, FORWARD, PROXY_LOSS, Call, Problem, documents, make_inputs
from measure import BF16, M3, Steps, steady

KL = ["kl"]


def bench_sparse(figures):
    """M3 heads at 65,536 tokens, random selection."""
    steps = Steps(M3, 65536, 2)
    alone = [call.prepare(PROXY_LOSS, KL) for call, _ in steps.sets]
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
    ms = steady(tasks, seconds=1.0)
    what = "dense forward + backward with proxy loss over without; 64/4/4/1 heads, 32,768 tokens, D 128, bf16"
    figures["dense.kl_overhead.m3.32k"] = (ms["with"] / ms["without"], "x", what)


def bench_scratch(figures):
    """Scratch of the dense operations: from shapes alone, so nothing is run."""
    for tokens, name in ((32768, "32k"), (65536, "64k"), (131072, "128k")):
        problem = Problem(M3, documents([tokens]), BF16, dense=True)
        call = Call(problem, make_inputs(problem))
        sizes = [len(call.prepare(o, [])[2].bytes) for o in (FORWARD, BACKWARD, BACKWARD_WITH_PROXY, PROXY_LOSS)]
        what = f"the most scratch of forward, backward and proxy loss, dense mode; 64/4/4/1 heads, {tokens:,} tokens"
        figures[f"dense.scratch_gib.m3.{name}"] = (max(sizes) / 2**30, "GiB", what)
        del call
        torch.cuda.empty_cache()


def bench_proxy(figures):
    bench_sparse(figures)
    torch.cuda.empty_cache()
    bench_dense(figures)
    torch.cuda.empty_cache()
    bench_scratch(figures)

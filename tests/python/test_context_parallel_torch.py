"""Context parallelism beside the rest of PyTorch: torch.compile, FSDP, DDP, checkpointing, dead ranks."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.fsdp
from ranks import Failed, Ranks
from test_context_parallel import BLOCK, GRAD_KL, TOP_K, Case, spread

from flashmsa.context_parallel import ContextParallel, attention
from flashmsa.module import MSAttention

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")


@pytest.fixture(scope="module")
def ranks():
    workers = Ranks(["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.device_mesh"])
    yield workers
    workers.close()


def compiled(group, case: Case):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    context = case.context(group, torch.distributed.get_world_size(group))
    tensors, dout, _ = case.inputs()
    names = ("q", "k", "v", "q_proxy", "k_proxy")
    grad_kl = torch.tensor(GRAD_KL)

    def run(function):
        x = [context.shard(tensors[name]).requires_grad_() for name in names]
        out, kl = function(*x)
        torch.autograd.backward([out, kl], [context.shard(dout), grad_kl])
        return [out.detach(), kl.detach(), *[t.grad for t in x]]

    def function(*x):
        return attention(*x, context, case.top_k, block_size=BLOCK, return_kl=True)

    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch._dynamo.config.capture_dynamic_output_shape_ops = True  # what fullgraph sets in later versions
    eager = run(function)
    seen = aot_autograd(fw_compiler=backend, bw_compiler=backend)
    return eager, run(torch.compile(function, fullgraph=True, backend=seen)), graphs


def test_compile_sees_the_collectives(ranks):
    case = Case((230, 55), keep_keys=False)
    for eager, traced, graphs in ranks.all(2, compiled, case):
        for x, y in zip(eager, traced, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
        steps = [[name.split(".")[1] for name in graph if "c10d" in name or "flashmsa" in name] for graph in graphs]
        # Proxy keys are waited for alone; the selection runs while keys and values travel.
        assert steps[0] == [
            *["all_gather_into_tensor"] * 3, "wait_tensor", "select", "wait_tensor", "wait_tensor", "schedule",
            "attention",
        ]  # fmt: skip
        assert steps[1] == [
            *["all_gather_into_tensor"] * 3, *["wait_tensor"] * 3, "backward_with_proxy",
            *["reduce_scatter_tensor"] * 3, *["wait_tensor"] * 3,
        ]  # fmt: skip


# ---- Other dimensions of a mesh -----------------------------------------------------------------------------------


def layer_and_batches(lengths):
    torch.manual_seed(0)
    layer = MSAttention(64, num_heads=4, num_kv_heads=2, block_size=BLOCK, top_k=TOP_K)
    total = sum(lengths)
    return layer, torch.randn(2, total, 64), torch.randn(2, total, 64), [0, *torch.tensor(lengths).cumsum(0).tolist()]


def on_mesh(group, kind: str, lengths: list[int]):
    """Two replicas of a pack spread over two ranks each; the gradient of the mean loss of the two packs."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    layer, hidden, target, cu = layer_and_batches(lengths)
    context = ContextParallel(cu, mesh["cp"])
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(layer, mesh=mesh["dp", "cp"]._flatten("all"))
        model = layer
    else:
        model = torch.nn.parallel.DistributedDataParallel(layer)
    batch = mesh["dp"].get_local_rank()
    out, kl = model(context.shard(hidden[batch]), context=context)
    loss = ((out - context.shard(target[batch])) ** 2).sum() + kl
    # FSDP and DDP average over all four ranks, where the two of a pack must be added.
    (loss * context.world).backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_beside_data_parallelism(ranks, kind):
    if kind == "fsdp" and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("fully_shard came with PyTorch 2.6")
    lengths = [150, 11, 40]
    layer, hidden, target, cu = layer_and_batches(lengths)
    for x, y in zip(hidden, target, strict=True):
        out, kl = layer(x, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
        ((((out - y) ** 2).sum() + kl) / 2).backward()
    for answer in ranks.all(4, on_mesh, kind, lengths):
        for name, p in layer.named_parameters():
            torch.testing.assert_close(answer[name], p.grad, atol=1e-4, rtol=1e-3)


def checkpointed(group, lengths, again: bool):
    layer, hidden, _, cu = layer_and_batches(lengths)
    context = ContextParallel(cu, group)
    x = context.shard(hidden[0]).requires_grad_()

    def run(x):
        return layer(x, context=context)

    out, kl = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) if again else run(x)
    (out.square().sum() + kl).backward()
    return [x.grad, *[p.grad for p in layer.parameters()]]


def test_activation_checkpointing(ranks):
    once, twice = (ranks.all(2, checkpointed, [90, 20], again) for again in (False, True))
    for a, b in zip(once, twice, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_example():
    """One process and two print the same but for the first line."""
    program = str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    texts = []
    for launcher in ([], torchrun):
        run = subprocess.run(
            [sys.executable, *launcher, program], capture_output=True, text=True, timeout=100, check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        texts.append(run.stdout.splitlines())
    assert texts[0][0].startswith("1 ranks with (2048,) rows")
    assert texts[1][0].startswith("2 ranks")
    assert len(texts[0]) == 7
    assert texts[0][1:] == texts[1][1:]


# ---- A rank that ends; the last test, since the processes are of no use after it ----------------------------------


def ends(group, case: Case):
    spread(group, case)
    if torch.distributed.get_rank(group) == 1:
        time.sleep(1)
        os._exit(7)
    return spread(group, case)


def test_a_dead_rank_ends_the_others(ranks):
    answers = ranks.run(3, ends, Case((230, 55)))
    assert [isinstance(answer, Failed) for answer in answers] == [True] * 3
    assert "EOFError" in str(answers[1])
    for answer in (answers[0], answers[2]):
        assert "a rank of the context-parallel group has ended" in str(answer)

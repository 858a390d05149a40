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
from conftest import DEVICES
from ranks import Failed
from test_context_parallel import BLOCK, DIM, NAMES, TOP_K, Case, losses, needs, spread, two_documents

from flashmsa._cp_exchange import Route, arrive, depart
from flashmsa.context_parallel import ContextParallel, attention
from flashmsa.module import MSAttention

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")


def needs_own_collectives(ranks) -> None:
    if ranks.where == "one_card":
        pytest.skip("what PyTorch itself calls does not work for ranks that share a card")


def compiled(group, case: Case):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    context = case.context(group, torch.distributed.get_world_size(group))
    tensors, dout, _ = case.inputs()

    def run(function):
        x = [context.shard(tensors[name]).requires_grad_() for name in NAMES]
        out, kl = function(*x)
        torch.autograd.backward(*losses(case, out, kl, context.shard(dout)))
        return [out.detach(), kl.detach(), *[t.grad for t in x]]

    def function(q_proxy, k_proxy, q, k, v):
        options = {"block_size": case.block_size, "deterministic": True, "return_kl": True}
        return attention(q, k, v, q_proxy, k_proxy, context, case.top_k, **options)

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
    needs(ranks, 2)
    needs_own_collectives(ranks)
    case = two_documents(ranks, keep_keys=False)
    for eager, traced, graphs in ranks.all(2, compiled, case):
        for x, y in zip(eager, traced, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
        steps = [[name.split(".")[1] for name in graph if "c10d" in name or "flashmsa" in name] for graph in graphs]
        # Proxy keys are waited for alone; the selection runs while keys and values travel.
        gather = "all_to_all_single" if ranks.device == "cpu" else "all_gather_into_tensor"
        assert steps[0] == [
            *[gather] * 3, "wait_tensor", "select", "wait_tensor", "wait_tensor", "schedule",
            "attention",
        ]  # fmt: skip
        assert steps[1] == [
            *[gather] * 3, *["wait_tensor"] * 3, "backward_with_proxy",
            *["reduce_scatter_tensor"] * 3, *["wait_tensor"] * 3,
        ]  # fmt: skip


def many_trips(group, rows: int, trips: int, at_once: int):
    """Rows leave again and again while others are on their way; how often they came back as another rank's."""
    world, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    x = torch.full((rows, 1, 4), float(rank))
    route = Route(rows, rows, world * rows, world, group.group_name)
    order = torch.arange(world * rows)
    wanted = order.div(rows, rounding_mode="floor").float()[:, None, None].expand(-1, 1, 4)
    wrong = 0
    for _ in range(trips):
        pending = [depart(x, route) for _ in range(at_once)]
        wrong += sum(not torch.equal(arrive(p, x, order, route), wanted) for p in pending)
    return wrong


def test_many_exchanges_at_once(ranks):
    """PyTorch's all_gather_into_tensor over gloo corrupts the heap here in five of six runs: see `_start_gather`."""
    needs(ranks, 2)
    if ranks.device != "cpu":
        pytest.skip("gloo alone has threads")
    assert ranks.all(2, many_trips, 8, 2000, 6) == [0, 0]


# ---- Other dimensions of a mesh -----------------------------------------------------------------------------------


def layer_and_batches(device, lengths, batches=2):
    torch.manual_seed(0)
    layer = MSAttention(64, num_heads=4, num_kv_heads=2, head_dim=DIM[device], block_size=BLOCK[device], top_k=TOP_K)
    hidden, target = torch.randn(2, batches, sum(lengths), 64).to(device)
    return layer.to(device), hidden, target, [0, *torch.tensor(lengths).cumsum(0).tolist()]


def on_mesh(group, kind: str, device: str, lengths: list[int], shape: tuple[int, int]):
    """Replicas of a layer with a pack each, which is spread over ranks; the gradient of the packs' mean loss."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "cp"))
    layer, hidden, target, cu = layer_and_batches(device, lengths, shape[0])
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
    # FSDP and DDP average over all ranks, where those of a pack must be added.
    (loss * context.world).backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_beside_data_parallelism(ranks, kind):
    if kind == "fsdp" and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("fully_shard came with PyTorch 2.6")
    needs(ranks, 2)
    needs_own_collectives(ranks)
    device, lengths = ranks.device, [9 * BLOCK[ranks.device] + 6, 11, 40]
    shape = (2, 2) if ranks.most == 4 else (1, ranks.most)
    layer, hidden, target, cu = layer_and_batches(device, lengths, shape[0])
    for x, y in zip(hidden, target, strict=True):
        out, kl = layer(x, cu_seqlens=torch.tensor(cu, dtype=torch.int32, device=device))
        ((((out - y) ** 2).sum() + kl) / shape[0]).backward()
    for answer in ranks.all(ranks.most, on_mesh, kind, device, lengths, shape):
        for name, p in layer.named_parameters():
            torch.testing.assert_close(answer[name], p.grad.cpu(), atol=1e-4, rtol=1e-3)


def checkpointed(group, device, lengths, again: bool):
    layer, hidden, _, cu = layer_and_batches(device, lengths)
    context = ContextParallel(cu, group)
    x = context.shard(hidden[0]).requires_grad_()

    def run(x):
        return layer(x, context=context)

    out, kl = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) if again else run(x)
    (out.square().sum() + kl).backward()
    return [x.grad, *[p.grad for p in layer.parameters()]]


def test_activation_checkpointing(ranks):
    lengths, exactly = [5 * BLOCK[ranks.device] + 10, 20], {"rtol": 0, "atol": 0} if ranks.device == "cpu" else {}
    world = min(2, ranks.most)
    once, twice = (ranks.all(world, checkpointed, ranks.device, lengths, again) for again in (False, True))
    for a, b in zip(once, twice, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, **exactly)


@pytest.mark.parametrize("device", DEVICES)
def test_example(device):
    """One process and two print the same but for the first line; on cards, where sums have no order, nearly."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 cards")
    program = str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    cards = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"NCCL_NVLS_ENABLE": "0"}
    texts = []
    for launcher in ([], torchrun):
        run = subprocess.run(
            [sys.executable, *launcher, program], capture_output=True, text=True, timeout=100,
            env={**os.environ, "OMP_NUM_THREADS": "1", **cards},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        texts.append(run.stdout.splitlines())
    assert texts[0][0].startswith("1 ranks with (2048,) rows")
    assert texts[1][0].startswith("2 ranks")
    assert len(texts[0]) == 7
    for one, two in zip(texts[0][1:], texts[1][1:], strict=True):
        if device == "cpu":
            assert one == two
        else:
            numbers = [[float(word) for word in text.split()[3::2]] for text in (one, two)]
            assert len(numbers[0]) == 2
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-3)


# ---- A rank that ends ---------------------------------------------------------------------------------------------


def ends(group, case: Case):
    spread(group, case)
    if torch.distributed.get_rank(group) == 1:
        time.sleep(1)
        os._exit(7)
    return spread(group, case)


def test_a_dead_rank_ends_the_others(ranks):
    needs(ranks, 2)
    answers = ranks.run(min(3, ranks.most), ends, two_documents(ranks))
    ranks.close()  # the processes are of no use any more
    assert all(isinstance(answer, Failed) for answer in answers)
    assert "EOFError" in str(answers[1])
    for answer in (answers[0], *answers[2:]):
        assert "a rank of the context-parallel group has ended" in str(answer)

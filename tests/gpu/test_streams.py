"""Streams, graphs, threads of other work beside ours, and repeatability under load."""

import threading

import pytest
import torch
from fmsa import BACKWARD_WITH_PROXY, DETERMINISTIC, FORWARD, SCHEDULE, SELECT, Call, Problem, documents, make_inputs
from reference import compare

GRADIENTS = ["dq", "dk", "dv", "dq_proxy", "dk_proxy", "kl"]
OUTPUTS = {SELECT: ["block_indices"], SCHEDULE: [], FORWARD: ["out", "lse"], BACKWARD_WITH_PROXY: GRADIENTS}


def prepare(call):
    return {
        operation: call.prepare(operation, outputs)
        for operation, outputs in OUTPUTS.items()
        if not (call.p.dense and operation < FORWARD)
    }


def enqueue(call, prepared):
    for operation, arguments in prepared.items():
        call.enqueue(operation, arguments)


def problem(lengths=(700, 1, 323), **options):
    options = {"dim": 64, "proxy_dim": 64, "block": 64, "top_k": 3, **options}
    return Problem((8, 2, 4, 1), documents(lengths), torch.bfloat16, **options)


@pytest.mark.parametrize("flags", [0, DETERMINISTIC])
@pytest.mark.parametrize("dense", [False, True])
def test_graph_replays_with_other_documents(dense, flags):
    """A capture fails on any allocation or synchronisation; a replay reads the fragments that are there then."""
    p = problem((700, 1, 323, 0), dense=dense, flags=flags, max_seqlen_k=1024)
    x = make_inputs(p, seed=1)
    call = Call(p, x)
    prepared = prepare(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue(call, prepared)
    for lengths in ((700, 1, 323, 0), (1024, 0, 0, 0), (3, 500, 21, 500), (100, 0, 50, 64)):
        other = problem(lengths, dense=dense, flags=flags, total_q=1024, total_k=1024)
        for mine, theirs in zip(p.arrays, other.arrays):
            mine.copy_(theirs)
        for buffer in call.buffers.values():
            buffer.poison()
        graph.replay()
        torch.cuda.synchronize()
        assert all(buffer.intact() for buffer in call.buffers.values())
        compare(
            other, x, call.outputs.get("block_indices"), {n: v for n, v in call.outputs.items() if n != "block_indices"}
        )


def test_side_stream_while_the_default_stream_is_busy():
    p = problem()
    x = make_inputs(p, seed=2)
    want = {n: v.clone() for n, v in Call(p, x).step().items()}
    call = Call(p, x)
    prepared = prepare(call)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    with torch.cuda.stream(side):
        enqueue(call, prepared)
        done.record()
    while not done.query():
        assert not busy.query(), "the side stream waited for the default stream"
    torch.cuda.synchronize()
    for name in ("block_indices", "out", "lse"):
        assert torch.equal(call.outputs[name], want[name]), name


def test_two_streams_and_two_threads_at_once():
    both = {"flags": DETERMINISTIC, "dim": 128, "proxy_dim": 128}
    problems = [problem((900, 124), block=128, **both), problem((200, 824), top_k=5, **both)]
    inputs = [make_inputs(p, seed=3) for p in problems]
    want = [{n: v.clone() for n, v in Call(p, x).step().items()} for p, x in zip(problems, inputs)]
    calls = [Call(p, x) for p, x in zip(problems, inputs)]
    prepared = [prepare(call) for call in calls]
    torch.cuda.synchronize()
    failures = []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    enqueue(calls[i], prepared[i])
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures
    for call, expected in zip(calls, want):
        for name, value in expected.items():
            assert torch.equal(call.outputs[name], value), name


@pytest.mark.parametrize("dense,top_k", [(False, 16), (True, 16)])
def test_200_repeats_under_load_are_bit_identical(dense, top_k):
    lengths = (1500, 548) if dense else (5000, 3000, 192)
    p = Problem((16, 2, 4, 1), documents(lengths), torch.bfloat16, top_k=top_k, dense=dense, flags=DETERMINISTIC)
    call = Call(p, make_inputs(p, seed=4))
    first = {n: v.clone() for n, v in call.step().items()}
    prepared = prepare(call)
    load = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    differs = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(200):
        for buffer in call.buffers.values():
            buffer.poison()
        if i % 3:
            with torch.cuda.stream(load):
                for _ in range(i % 5):
                    torch.mm(a, a)
        enqueue(call, prepared)
        for name, value in first.items():
            width = {2: torch.int16, 4: torch.int32}[value.dtype.itemsize]
            differs += (call.outputs[name].view(width) != value.view(width)).sum()
    assert int(differs) == 0


def test_current_device_and_index():
    """device_index names the card; the thread's current one stays."""
    p = problem()
    call = Call(p, make_inputs(p, seed=5))
    config, tensors, workspace = call.prepare(SELECT, ["block_indices"])
    config.device_index = 0
    call.enqueue(SELECT, (config, tensors, workspace))
    torch.cuda.synchronize()
    assert torch.cuda.current_device() == 0
    assert (call.outputs["block_indices"][..., 0] == 0).float().mean() > 0

"""Arguments that the CUDA backend refuses: a sentence that names them, and nothing written."""

import ctypes

import pytest
import torch
from fmsa import (
    ARGUMENT,
    CHECK_FRAGMENTS,
    CUDA_ERROR,
    DETERMINISTIC,
    POISON,
    SCHEDULE,
    SELECT,
    UNSUPPORTED,
    WORKSPACE,
    Buffer,
    Call,
    Failure,
    Problem,
    documents,
    lib,
    make_inputs,
)

GOOD = {"heads": (8, 2, 4, 1), "fragments": documents([300]), "dim": 64, "proxy_dim": 64, "block": 64, "top_k": 3}


def refused(status, word, **change):
    p = Problem(**{**GOOD, **change})
    call = Call(p, make_inputs(p))
    with pytest.raises(Failure) as failure:
        call.prepare(SELECT, ["block_indices"])
    assert failure.value.status == status and word in str(failure.value), str(failure.value)


def test_shapes_that_the_kernels_do_not_take():
    refused(UNSUPPORTED, "head_dim", dim=80)
    refused(UNSUPPORTED, "proxy_head_dim", proxy_dim=32)
    refused(UNSUPPORTED, "block_size", block=100)
    refused(UNSUPPORTED, "top_k", top_k=129)
    refused(UNSUPPORTED, "dtype", dtype=torch.float64)
    refused(ARGUMENT, "num_kv_heads", heads=(6, 4, 1, 1))
    refused(ARGUMENT, "num_proxy_heads", heads=(6, 1, 4, 1))
    refused(WORKSPACE, "scratch_limit", scratch_limit=1000)


def test_workspace_too_small_writes_nothing():
    p = Problem(**GOOD)
    call = Call(p, make_inputs(p))
    config, tensors, workspace = call.prepare(SELECT, ["block_indices"])
    small = Buffer(len(workspace.bytes) - 256, "cuda")
    with pytest.raises(Failure) as failure:
        call.enqueue(SELECT, (config, tensors, small))
    torch.cuda.synchronize()
    assert failure.value.status == WORKSPACE and "workspace" in str(failure.value)
    assert (small.whole == POISON).all() and (call.outputs["block_indices"] == -1).all()


def test_misaligned_views():
    p = Problem(**GOOD)
    x = make_inputs(p)
    wide = torch.empty(300, 4 * 64 + 1, dtype=p.dtype, device="cuda")
    call = Call(p, {**x, "q_proxy": wide[:, 1:].view(300, 4, 64)})
    with pytest.raises(Failure) as failure:
        call.select()
    assert failure.value.status == ARGUMENT and "q_proxy" in str(failure.value)


@pytest.mark.parametrize(
    "fragments,word",
    [
        ([(0, 100, 0, 100), (50, 200, 100, 250)], "q_begin[1]"),
        ([(0, 100, 0, 100), (100, 200, 50, 250)], "k_begin[1]"),
        ([(0, 100, 0, 60)], "keys"),
        ([(0, 100, 0, 400)], "k_end[0]"),
        ([(5, 4, 0, 10)], "q_begin[0]"),
    ],
)
def test_fragments_are_checked_on_request(fragments, word):
    p = Problem(**{**GOOD, "fragments": fragments, "total_q": 300, "total_k": 300, "flags": CHECK_FRAGMENTS})
    call = Call(p, make_inputs(Problem(**GOOD)))
    with pytest.raises(Failure) as failure:
        call.select()
    assert failure.value.status == ARGUMENT and word in str(failure.value), str(failure.value)
    assert (call.outputs["block_indices"] == -1).all()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "fragments",
    [
        [(0, 300, 0, 300)] * 3,
        [(0, 100, 0, 100), (100, 200, 50, 250)],
        [(0, 100, 0, 100), (50, 200, 100, 250)],
        [(0, 100, 0, 60), (100, 7_000_000, -5, 2**31 - 1)],
        [(-(2**31), 2**31 - 1, -(2**31), 2**31 - 1)] * 3,
        [(200, 300, 200, 300), (0, 100, 0, 100)],
    ],
)
def test_wrong_fragments_count_as_none(fragments, dense):
    """Without the check all rows are in no fragment; deterministic mode, whose turns wait, ends as well."""
    changes = {"fragments": fragments, "total_q": 300, "total_k": 300, "dense": dense, "flags": DETERMINISTIC}
    call = Call(Problem(**{**GOOD, **changes}), make_inputs(Problem(**GOOD)))
    outputs = call.step()
    assert (outputs["lse"] == float("-inf")).all()
    assert dense or (outputs["block_indices"] == -1).all()
    for name in ("out", "dq", "dk", "dv", "dq_proxy", "dk_proxy", "kl"):
        assert (outputs[name] == 0).all(), name


def test_errors_leave_cuda_usable():
    """A call that fails within CUDA says so, clears its own error, and the next call runs."""
    p = Problem(**{**GOOD, "flags": CHECK_FRAGMENTS})
    call = Call(p, make_inputs(p))
    prepared = call.prepare(SELECT, ["block_indices"])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(Failure) as failure:
            call.enqueue(SELECT, prepared)
        with pytest.raises(RuntimeError):
            graph.capture_end()
    assert failure.value.status == CUDA_ERROR and "fragments" in str(failure.value)
    torch.cuda.synchronize()
    call.select()
    call.run(SCHEDULE, [])


def test_devices_are_described():
    assert lib.fmsa_device_count(1) >= 1
    text = ctypes.create_string_buffer(200)
    assert lib.fmsa_device_description(1, 0, text, ctypes.c_size_t(200)) == 0
    assert torch.cuda.get_device_name(0) in text.value.decode()

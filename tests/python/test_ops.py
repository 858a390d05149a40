"""The operators: opcheck, values through each step, torch.compile, autocast."""

from __future__ import annotations

import pytest
import torch
from conftest import make_inputs
from torch._dynamo.testing import CompileCounterWithBackend

import flashmsa
from flashmsa import ops

OPS = torch.ops.flashmsa
BLOCK, TOP_K = 64, 2


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values inside a wider tensor, as a view of a fused projection has them."""
    wide = torch.full((x.shape[0], x.shape[1] + 2, x.shape[2]), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, 1:-1] = x.detach()
    return wide[:, 1:-1].requires_grad_(x.requires_grad)


def samples(device: str, view=lambda x: x, dense: bool = False):
    """name -> arguments of every operator, with true results of the steps before it."""
    x = make_inputs([100, 1, 128], device=device)
    q_proxy, k_proxy, q, k, v = [view(t) for t in x.leaves()]
    plain = [t.detach() for t in (q_proxy, k_proxy, q, k, v)]
    cu, top_k = (x.cu, x.cu), 0 if dense else TOP_K
    calls = {}
    schedule = None
    if not dense:
        calls["select"] = (plain[0], plain[1], *cu, top_k, BLOCK)
        indices = ops.select(*calls["select"])
        calls["schedule"] = (indices, plain[2], plain[3], *cu, BLOCK)
        schedule = ops.schedule(*calls["schedule"])
    calls["forward"] = (q, k, v, schedule, *cu, 2, top_k, BLOCK)
    out, lse = (t.detach() for t in ops.forward(*calls["forward"]))
    calls["attention"] = (q_proxy, k_proxy, q, k, v, schedule, *cu, top_k, BLOCK)
    grad_kl = torch.tensor(0.5, device=device)
    calls["proxy_loss"] = (*plain[:4], lse, schedule, grad_kl, *cu, top_k, BLOCK)
    dout = view(torch.randn(out.shape, device=device))
    calls["backward"] = (dout, *plain[2:], out, lse, schedule, *cu, 2, top_k, BLOCK)
    calls["backward_with_proxy"] = (dout, grad_kl, *plain, out, lse, schedule, *cu, top_k, BLOCK)
    return calls


def by_indices(calls):
    """The same calls with the selection in the schedule's place, which each operator then turns into its own."""
    indices = calls["schedule"][0]
    tail = {
        "attention": (0.0, 0.0, 0, 0, False, True, indices),
        "proxy_loss": (0.0, 0.0, 0, 0, False, False, True, indices),
        "backward": (0.0, 0, False, False, indices),
        "backward_with_proxy": (0.0, 0.0, 0, 0, False, False, indices),
    }
    is_schedule = [isinstance(a, torch.Tensor) and a.dtype == torch.uint8 for name in tail for a in calls[name]]
    assert sum(is_schedule) == len(tail)
    return {
        name: (*[None if isinstance(a, torch.Tensor) and a.dtype == torch.uint8 else a for a in calls[name]], *more)
        for name, more in tail.items()
    }


NAMES = ["select", "schedule", "forward", "attention", "proxy_loss", "backward", "backward_with_proxy"]


@pytest.mark.parametrize("view", [lambda x: x, strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device, name, view):
    torch.library.opcheck(getattr(OPS, name).default, samples(device, view)[name])


@pytest.mark.parametrize("view", [lambda x: x, strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", NAMES[2:])
def test_opcheck_dense(device, name, view):
    torch.library.opcheck(getattr(OPS, name).default, samples(device, view, dense=True)[name])


@pytest.mark.parametrize("view", [lambda x: x, strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", NAMES[3:])
def test_indices_in_the_place_of_a_schedule(device, name, view):
    calls = samples(device, view)
    operator, arguments = getattr(OPS, name).default, by_indices(calls)[name]
    torch.library.opcheck(operator, arguments)
    for mine, theirs in zip(operator(*arguments), operator(*calls[name]), strict=True):
        torch.testing.assert_close(mine, theirs)


def assert_compiles(step, device: str, lengths: list[list[int]]) -> None:
    """A step (inputs -> out, kl) and its compiled form agree in results and gradients over lengths that change, and it
    is compiled once."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for seed, documents in enumerate(lengths):
        results = []
        for call in (step, compiled):
            x = make_inputs(documents, device=device, seed=seed)
            out, kl = call(x)
            (out.square().mean() + 3 * kl).backward()
            results.append([out, kl, *[t.grad for t in x.leaves()]])
        for plain, fused in zip(*results, strict=True):
            torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("top_k", [0, 2])
def test_compile_varlen(device, top_k):
    def step(x):
        return flashmsa.flash_msa_varlen_func(
            x.q * 1.5, x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, 0, 0, top_k, block_size=BLOCK, return_kl=True
        )

    assert_compiles(step, device, [[130, 65], [200, 77, 3], [333]])


def test_compile_batched(device):
    def step(x):
        batched = [t.unflatten(0, (3, -1)).transpose(1, 2) for t in x.leaves()]
        return flashmsa.flash_msa_func(*batched, TOP_K * BLOCK, 0.125, block_size=BLOCK, kl_value=False)

    assert_compiles(step, device, [[120], [210], [300]])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")
def test_compile_by_the_default_backend():
    """Inductor on the card, where operators meet kernels that it generates: a layer's projections, attention, loss."""
    pytest.importorskip("triton")
    torch._dynamo.reset()
    torch.manual_seed(0)
    heads = (2, 1, 4, 2, 2)
    projections = torch.nn.ModuleList([torch.nn.Linear(96, h * 64, bias=False) for h in heads]).to(
        "cuda", torch.bfloat16
    )

    def step(hidden, cu):
        q_proxy, k_proxy, q, k, v = [p(hidden).view(-1, h, 64) for p, h in zip(projections, heads)]
        out, kl = flashmsa.flash_msa_varlen_func(
            q * 1.5, k, v, q_proxy, k_proxy, cu, cu, 0, 0, TOP_K, block_size=BLOCK, return_kl=True, deterministic=True
        )
        return out.float().square().mean() + kl

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for lengths in ([130, 65], [200, 77, 3]):
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
        hidden = torch.randn(sum(lengths), 96, device="cuda", dtype=torch.bfloat16)
        results = []
        for call in (step, compiled):
            projections.zero_grad()
            loss = call(hidden, cu)
            loss.backward()
            results.append([loss.detach(), *[p.weight.grad for p in projections]])
        for plain, fused in zip(*results, strict=True):
            torch.testing.assert_close(fused, plain, atol=1e-4, rtol=3e-2)


def test_compile_fills_the_metric(device):
    """kl_metric without kl_value, which eager calls fill in the backward pass."""
    x = make_inputs([130, 65], device=device)
    metric = torch.full((), -1.0, device=device)

    def step(*leaves):
        q_proxy, k_proxy, q, k, v = leaves
        return flashmsa.flash_msa_varlen_func(
            q, k, v, q_proxy, k_proxy, x.cu, x.cu, 0, 0, TOP_K, block_size=BLOCK, return_kl=True, kl_value=False,
            kl_metric=metric,
        )  # fmt: skip

    out, kl = torch.compile(step, backend="aot_eager", fullgraph=True)(*x.leaves())
    (out.sum() + 3 * kl).backward()
    filled = metric.clone()
    y = x.clone()
    out, eager_kl = step(*y.leaves())
    (out.sum() + 3 * eager_kl).backward()
    assert kl.item() == eager_kl.item() == 0.0
    torch.testing.assert_close(filled, metric, atol=1e-6, rtol=1e-5)
    assert metric.item() > 0
    for mine, theirs in zip(x.leaves(), y.leaves(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["proxy_loss", "backward", "backward_with_proxy"])
def test_results_handed_to_a_backward_pass_are_checked(device, name):
    """out, dout, lse and schedule of another type or shape are refused, and lse may have any strides."""
    calls = samples(device)
    operator = getattr(OPS, name).default
    arguments = calls[name]
    expected = operator(*arguments)
    lse_at = next(i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.dim() == 2)
    schedule_at = lse_at + 1

    def call(at, changed):
        return operator(*arguments[:at], changed, *arguments[at + 1 :])

    lse, schedule = arguments[lse_at], arguments[schedule_at]
    for mine, theirs in zip(call(lse_at, lse.T.contiguous().T), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    places = [lse_at] if name == "proxy_loss" else [lse_at, 0, lse_at - 1]  # dout comes first, out before lse
    for at in places:
        for dtype in (torch.float64, torch.bfloat16):
            with pytest.raises(TypeError, match=r"it must be torch\.float32"):
                call(at, arguments[at].to(dtype))
        for wrong in (arguments[at][:1], arguments[at][None]):
            with pytest.raises(ValueError, match="has shape"):
                call(at, wrong)
    with pytest.raises(TypeError, match="schedule"):
        call(schedule_at, schedule.float())
    with pytest.raises(ValueError, match="schedule"):
        call(schedule_at, torch.stack([schedule, schedule], 1)[:, 0])
    with pytest.raises(ValueError, match="schedule is missing"):
        call(schedule_at, None)


@pytest.mark.parametrize("name", ["proxy_loss", "backward_with_proxy"])
def test_a_gradient_of_the_loss_of_another_type_is_refused(device, name):
    operator, arguments = getattr(OPS, name).default, samples(device)[name]
    at = next(i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.dim() == 0)
    for wrong in (arguments[at].double(), torch.ones(2, device=device)):
        with pytest.raises(TypeError, match=r"grad_kl is .* it must be one torch\.float32 value"):
            operator(*arguments[:at], wrong, *arguments[at + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_operators_refuse_batches(device, name):
    """The operators are for packed tensors; a batch of one is refused as one of many is."""
    arguments = samples(device)[name]
    batched = [
        a[None].transpose(1, 2) if isinstance(a, torch.Tensor) and a.dim() == 3 and a.is_floating_point() else a
        for a in arguments
    ]
    with pytest.raises(ValueError, match=r"it must be \[tokens, heads, dim\]"):
        getattr(OPS, name).default(*batched)


def test_a_selection_of_another_shape_is_refused(device):
    calls = samples(device)
    indices, *rest = calls["schedule"]
    for wrong in (indices[0], indices[0, 0, 0], indices[None]):
        with pytest.raises(ValueError, match="block_indices has shape"):
            ops.schedule(wrong, *rest)
        with pytest.raises(ValueError, match="block_indices has shape"):
            OPS.proxy_loss.default(*by_indices(calls)["proxy_loss"][:-1], wrong)


def test_compile_without_tokens(device):
    """A batch of sequences of no tokens, after one with some."""
    compiled = torch.compile(
        lambda *x: flashmsa.flash_msa_func(*x, 128, 0.2, block_size=BLOCK),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for tokens in (40, 0):
        leaves = [torch.randn(2, h, tokens, 64, device=device, requires_grad=True) for h in (2, 1, 4, 2, 2)]
        out, kl = compiled(*leaves)
        expected, expected_kl = flashmsa.flash_msa_func(*leaves, 128, 0.2, block_size=BLOCK)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(kl, expected_kl)
        (out.sum() + kl).backward()
        assert all(x.grad.shape == x.shape for x in leaves)

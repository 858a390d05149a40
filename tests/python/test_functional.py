"""flash_msa_varlen_func and the batched functions against attention written out in PyTorch."""

from __future__ import annotations

import contextlib

import eager
import pytest
import torch
from conftest import Inputs, make_inputs
from torch.utils.checkpoint import checkpoint

import flashmsa
import flashmsa.ops  # registers torch.ops.flashmsa.*
from flashmsa import functional

F64 = torch.float64
BLOCK = 64


def varlen(x: Inputs, top_k: int, block_size: int = BLOCK, **options):
    longest = int((x.cu[1:] - x.cu[:-1]).max())
    return flashmsa.flash_msa_varlen_func(
        x.q, x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, longest, longest, top_k, block_size=block_size, **options
    )


def reference(x: Inputs, top_k: int, block_size: int = BLOCK, block_indices=None):
    """out, kl and lse in fp64 over the selection that the package makes for x."""
    visible, position = eager.positions(x.cu, x.cu, len(x.q), len(x.k))
    support = visible.expand(x.q_proxy.shape[1], -1, -1)
    if top_k:
        if block_indices is None:
            block_indices = flashmsa.ops.select(x.q_proxy, x.k_proxy, x.cu, x.cu, top_k, block_size)
        support = eager.selected(block_indices, visible, position, block_size)
    wide = x.clone(F64)
    return (*eager.attention(*wide.leaves(), support), wide)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("heads", [(4, 2, 2, 1), (8, 1, 4, 4), (6, 3, 1, 1), (2, 2, 2, 2)])
def test_varlen_matches_eager(device, heads, top_k):
    x = make_inputs([1, 200, 64, 129], heads, device=device)
    out, kl, lse = varlen(x, top_k, return_kl=True, return_lse=True)
    expected, expected_kl, expected_lse, wide = reference(x, top_k)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kl.double(), expected_kl, atol=1e-6, rtol=1e-5)
    dout = torch.randn_like(out)
    torch.autograd.backward([out, kl], [dout, torch.tensor(2.5, device=device)])
    torch.autograd.backward([expected, expected_kl], [dout.double(), torch.tensor(2.5, device=device, dtype=F64)])
    for mine, theirs in zip(x.leaves(), wide.leaves(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("layout", ["transposed", "contiguous"])
def test_batched_matches_varlen(device, layout, top_k):
    """[B, H, S, D] in either layout gives what the packed rows give, bit by bit, gradients too."""
    batch, tokens, dim = 2, 192, 64
    x = make_inputs([tokens] * batch, dim=dim, device=device)
    block_size = BLOCK if top_k else 128
    expected, expected_kl = varlen(x, top_k, block_size, return_kl=True, deterministic=True)
    dout = torch.randn_like(expected)
    torch.autograd.backward([expected, expected_kl], [dout, torch.tensor(2.0, device=device)])
    leaves = []
    for t in x.leaves():
        view = t.detach().unflatten(0, (batch, tokens)).transpose(1, 2)
        leaves.append((view.contiguous() if layout == "contiguous" else view).requires_grad_())
    if top_k:
        out, kl = flashmsa.flash_msa_func(*leaves, top_k * BLOCK, dim**-0.5, block_size=BLOCK, deterministic=True)
    else:
        out, kl = flashmsa.flash_msa_warmup_func(*leaves, 128, dim**-0.5, deterministic=True)
    assert out.shape == (batch, tokens, x.q.shape[1] * dim)
    torch.autograd.backward([out, kl], [dout.view_as(out), torch.tensor(2.0, device=device)])
    assert torch.equal(out.view_as(expected), expected)
    assert torch.equal(kl, expected_kl)
    for mine, packed in zip(leaves, x.leaves(), strict=True):
        assert torch.equal(mine.grad.transpose(1, 2).flatten(0, 1), packed.grad)


def test_document_list_is_cu_seqlens(device):
    x = make_inputs([100, 28, 64, 64], device=device)
    batched = [t.detach().unflatten(0, (2, 128)).transpose(1, 2) for t in x.leaves()]
    ids = torch.tensor([[5] * 100 + [6] * 28, [6] * 64 + [5] * 64], device=device)
    by_list, kl_by_list = flashmsa.flash_msa_func(*batched, 128, 0.125, ids, block_size=BLOCK, deterministic=True)
    by_cu, kl_by_cu = flashmsa.flash_msa_func(
        *batched, 128, 0.125, cu_seqlens=x.cu, block_size=BLOCK, deterministic=True
    )
    packed, kl = varlen(x, 2, return_kl=True, deterministic=True)
    assert torch.equal(by_list, by_cu)
    assert torch.equal(by_list.view_as(packed), packed)
    assert torch.equal(kl_by_list, kl)
    assert torch.equal(kl_by_cu, kl)


def test_kl_metric_and_placeholder(device):
    """The KL value arrives where it was asked for: in kl_loss, in the metric, in the backward pass."""
    x = make_inputs([150, 90], device=device)
    _, kl = varlen(x, 2, return_kl=True, deterministic=True)
    forward_metric, backward_metric = (torch.full((), -1.0, device=device) for _ in range(2))
    varlen(x, 2, kl_metric=forward_metric, deterministic=True)
    assert torch.equal(forward_metric, kl.detach())
    out, placeholder = varlen(x, 2, return_kl=True, kl_value=False, kl_metric=backward_metric)
    assert placeholder.item() == 0.0
    assert backward_metric.item() == -1.0
    (out.sum() + placeholder).backward()
    torch.testing.assert_close(backward_metric, kl.detach(), atol=1e-6, rtol=1e-5)
    # A metric alone, with nothing that trains the proxies, is filled as well.
    backward_metric.fill_(-1.0)
    varlen(x, 2, kl_value=False, kl_metric=backward_metric).sum().backward()
    torch.testing.assert_close(backward_metric, kl.detach(), atol=1e-6, rtol=1e-5)


def test_gradients_go_where_they_belong(device):
    """out teaches the main tensors alone, kl the proxies alone; what needs no gradient gets none."""
    x = make_inputs([130], device=device)
    out, kl = varlen(x, 2, return_kl=True)
    assert torch.autograd.grad(out.sum(), x.leaves()[:2], retain_graph=True, allow_unused=True) == (None, None)
    assert torch.autograd.grad(kl, x.leaves()[2:], retain_graph=True, allow_unused=True) == (None, None, None)
    both = torch.autograd.grad(kl, x.leaves()[:2])
    assert all(g.abs().max() > 0 for g in both)
    x = make_inputs([130], device=device)
    x.k.requires_grad_(False)
    x.q_proxy.requires_grad_(False)
    out, kl = varlen(x, 2, return_kl=True)
    (out.sum() + kl).backward()
    assert x.k.grad is None
    assert x.q_proxy.grad is None
    assert all(t.grad.abs().max() > 0 for t in (x.q, x.v, x.k_proxy))


def test_proxies_are_kept_only_for_their_gradients():
    """Without a KL loss, or with proxies that do not learn, the backward pass holds no proxies."""

    def kept(x: Inputs, **options) -> set[int]:
        """Storages that the step saves."""
        storages = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: storages.add(t.untyped_storage().data_ptr()) or t, lambda t: t
        ):
            varlen(x, 2, **options)
        return storages

    x = make_inputs([90])
    proxies = {t.untyped_storage().data_ptr() for t in (x.q_proxy, x.k_proxy)}
    assert proxies <= kept(x, return_kl=True)
    assert not proxies & kept(x)
    x.q_proxy.requires_grad_(False)
    x.k_proxy.requires_grad_(False)
    assert not proxies & kept(x, return_kl=True)


@pytest.mark.parametrize("batched", [False, True])
def test_saved_tensors_may_change_strides(device, batched):
    """Hooks that offload what a node saves may bring it back contiguous, whatever strides it had."""
    x = make_inputs([60, 60], device=device)

    def gradients(hooks):
        y = [t.detach().requires_grad_() for t in x.leaves()]
        wide = [torch.cat([t, t], 1)[:, : t.shape[1]] for t in y]
        with hooks:
            if batched:
                rows = [t.unflatten(0, (2, 60)).transpose(1, 2) for t in wide]
                out, kl = flashmsa.flash_msa_func(*rows, 128, 0.125, block_size=BLOCK, deterministic=True)
            else:
                out, kl = varlen(Inputs(*wide, x.cu), 2, return_kl=True, deterministic=True)
        (out.square().sum() + kl).backward()
        return [t.grad for t in y]

    def contiguous(t):
        return t.clone(memory_format=torch.contiguous_format)

    expected = gradients(contextlib.nullcontext())
    assert_all_equal(gradients(torch.autograd.graph.saved_tensors_hooks(contiguous, lambda t: t)), expected)


def test_expanded_and_transposed_gradients(device):
    """dout of out.sum() has stride 0; one that was transposed has its last dimension strided."""
    x = make_inputs([70, 60], device=device)
    for make in (
        lambda out: torch.ones((), device=device).expand_as(out),
        lambda out: torch.randn_like(out).mT.contiguous().mT,
    ):
        grads = []
        dout = None
        for dense in (False, True):
            y = x.clone()
            out = varlen(y, 2, deterministic=True)
            dout = make(out) if dout is None else dout
            out.backward(dout.contiguous() if dense else dout)
            grads.append([t.grad for t in (y.q, y.k, y.v)])
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)


def test_fused_projection(device):
    """q, k and v as views of one tensor give what copies give."""
    x = make_inputs([120, 9], (4, 2, 2, 1), device=device)
    fused = torch.cat([t.detach() for t in (x.q, x.k, x.v)], 1).requires_grad_()
    q, k, v = fused.split([4, 2, 2], 1)
    out = flashmsa.flash_msa_varlen_func(
        q, k, v, x.q_proxy, x.k_proxy, x.cu, x.cu, 0, 0, 2, block_size=BLOCK, deterministic=True
    )
    expected = varlen(x, 2, deterministic=True)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    out.backward(dout)
    expected.backward(dout)
    assert torch.equal(fused.grad, torch.cat([x.q.grad, x.k.grad, x.v.grad], 1))


def test_own_block_indices(device):
    """A caller's selection, shuffled within rows and inside a larger buffer, changes nothing."""
    x = make_inputs([300, 40], device=device)
    indices = flashmsa.ops.select(x.q_proxy, x.k_proxy, x.cu, x.cu, 3, BLOCK)
    wide = torch.zeros(indices.shape[0], 400, 3, dtype=torch.int32, device=device)
    wide[:, 30:370] = indices.flip(-1)
    expected = varlen(x, 3, deterministic=True)
    assert torch.equal(varlen(x, 3, block_indices=wide[:, 30:370], deterministic=True), expected)


def test_dense_attention_refuses_block_indices(device):
    x = make_inputs([70], device=device)
    indices = flashmsa.ops.select(x.q_proxy, x.k_proxy, x.cu, x.cu, 1, BLOCK)
    with pytest.raises(ValueError, match="block_indices was given with top_k 0"):
        varlen(x, 0, block_indices=indices)


def test_fragments_with_begins_and_ends(device):
    """Chunks of one document, as a context-parallel rank has them, are fragments that begin at one key."""
    x = make_inputs([256], device=device)
    whole = varlen(x, 2)
    rows = torch.cat([torch.arange(0, 64), torch.arange(192, 256)]).to(device)
    q_bounds = torch.tensor([[0, 64], [64, 128]], dtype=torch.int32, device=device)
    k_bounds = torch.tensor([[0, 0], [64, 256]], dtype=torch.int32, device=device)
    part = flashmsa.flash_msa_varlen_func(
        x.q[rows], x.k, x.v, x.q_proxy[rows], x.k_proxy, q_bounds, k_bounds, 64, 256, 2, block_size=BLOCK
    )
    torch.testing.assert_close(part, whole[rows], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("top_k", [0, 2])
def test_gradcheck(top_k):
    """fp64 on the CPU: out through q, k, v and the KL through the proxies, over a selection that stays."""
    x = make_inputs([19, 26], (2, 1, 2, 1), dim=8, dtype=F64)
    indices = flashmsa.ops.select(x.q_proxy, x.k_proxy, x.cu, x.cu, 2, 16) if top_k else None

    def call(q_proxy, k_proxy, q, k, v):
        return flashmsa.flash_msa_varlen_func(
            q, k, v, q_proxy, k_proxy, x.cu, x.cu, 0, 0, top_k, block_size=16, block_indices=indices, return_kl=True
        )

    fixed = [t.detach() for t in x.leaves()]
    assert torch.autograd.gradcheck(lambda q, k, v: call(*fixed[:2], q, k, v)[0], x.leaves()[2:])
    assert torch.autograd.gradcheck(lambda a, b: call(a, b, *fixed[2:])[1], x.leaves()[:2])


def test_autocast(device):
    """q and k in fp32 with v in bf16 run in the autocast type; lse, kl and the gradients keep theirs."""
    x = make_inputs([100], device=device)
    v = x.v.detach().bfloat16().requires_grad_()
    arguments = (x.q_proxy, x.k_proxy, x.cu, x.cu, 100, 100, 2)
    with torch.autocast(device, torch.bfloat16):
        out, kl, lse = flashmsa.flash_msa_varlen_func(
            x.q, x.k, v, *arguments, block_size=BLOCK, return_kl=True, return_lse=True, deterministic=True
        )
        by_operator = torch.ops.flashmsa.forward(x.q, x.k, v, None, x.cu, x.cu, x.q_proxy.shape[1], 0, BLOCK)
    assert (out.dtype, kl.dtype, lse.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert by_operator[0].dtype == torch.bfloat16
    (out.float().sum() + kl).backward()
    assert (x.q.grad.dtype, v.grad.dtype, x.q_proxy.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    low = Inputs(*[t.detach().bfloat16() for t in x.leaves()], x.cu)
    assert torch.equal(out, varlen(low, 2, deterministic=True))


def test_no_grad_and_inference_mode(device):
    x = make_inputs([77], device=device)
    expected = varlen(x, 2, deterministic=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(varlen(x, 2, deterministic=True), expected)
    batched = [t.detach()[None].transpose(1, 2).requires_grad_() for t in x.leaves()]
    with torch.inference_mode():
        flashmsa.flash_msa_func(*batched, 128, 0.125, block_size=BLOCK)
    flashmsa.flash_msa_func(*batched, 128, 0.125, block_size=BLOCK)[0].sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_is_bit_identical(device, reentrant):
    x = make_inputs([200, 100], device=device)

    def block(q_proxy, k_proxy, q, k, v):
        return varlen(Inputs(q_proxy, k_proxy, q, k, v, x.cu), 2, return_kl=True, deterministic=True)

    grads = []
    for replays in (False, True):
        y = x.clone()
        if replays:
            out, kl = checkpoint(block, *y.leaves(), use_reentrant=reentrant)
        else:
            out, kl = block(*y.leaves())
        (out.square().sum() + kl).backward()
        grads.append([out, kl, *[t.grad for t in y.leaves()]])
    for plain, replayed in zip(*grads, strict=True):
        assert torch.equal(plain, replayed)


def test_selective_checkpoint_replays_the_selection(device):
    """With a policy that keeps block indices, the second forward pass does not select again."""
    if not hasattr(torch.utils.checkpoint, "CheckpointPolicy"):
        pytest.skip("this PyTorch has no selective checkpointing")
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    select = torch.ops.flashmsa.select.default
    selections = 0

    def policy(context, operator, *_args, **_kwargs):
        nonlocal selections
        selections += operator is select and not context.is_recompute
        return CheckpointPolicy.MUST_SAVE if operator is select else CheckpointPolicy.PREFER_RECOMPUTE

    x = make_inputs([200], device=device)
    out, kl = checkpoint(
        lambda *leaves: varlen(Inputs(*leaves, x.cu), 2, return_kl=True),
        *x.leaves(),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    (out.sum() + kl).backward()
    expected = x.clone()
    plain, plain_kl = varlen(expected, 2, return_kl=True)
    (plain.sum() + plain_kl).backward()
    assert selections == 1
    for mine, theirs in zip(x.leaves(), expected.leaves(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kl_value", [True, False])
def test_selective_checkpoint_fills_the_metric(device, kl_value):
    """Where operators are watched, a metric without kl_value has its value from the forward pass."""
    if not hasattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts"):
        pytest.skip("this PyTorch has no selective checkpointing")
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    x = make_inputs([200], device=device)
    metric = torch.full((), -1.0, device=device)
    out, kl = checkpoint(
        lambda *leaves: varlen(Inputs(*leaves, x.cu), 2, return_kl=True, kl_value=kl_value, kl_metric=metric),
        *x.leaves(),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.flashmsa.select.default]),
    )
    (out.sum() + kl).backward()
    expected = x.clone()
    plain, plain_kl = varlen(expected, 2, return_kl=True)
    (plain.sum() + plain_kl).backward()
    torch.testing.assert_close(metric, plain_kl.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(kl, plain_kl if kl_value else torch.zeros_like(kl), atol=1e-6, rtol=1e-5)
    for mine, theirs in zip(x.leaves(), expected.leaves(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_deterministic_algorithms_are_honoured(device, monkeypatch):
    from flashmsa import _library, functional

    seen = []
    real = functional.Options
    monkeypatch.setattr(functional, "Options", lambda *a, **k: seen.append(real(*a, **k).flags) or real(*a, **k))
    x = make_inputs([64], device=device)
    varlen(x, 1)
    torch.use_deterministic_algorithms(True)
    try:
        varlen(x, 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [0, _library.FLAG_DETERMINISTIC]


def test_double_backward_is_refused():
    """Also where the incoming gradient is a constant, and for a batch."""
    x = make_inputs([40])
    batched = [t.detach()[None].transpose(1, 2).requires_grad_() for t in x.leaves()]
    for out, q in (
        (varlen(x, 1).square(), x.q),
        (varlen(x, 1), x.q),
        (flashmsa.flash_msa_func(*batched, 64, 0.125, block_size=BLOCK)[0], batched[2]),
        (flashmsa.flash_msa_func(*batched, 64, 0.125, block_size=BLOCK)[1], batched[0]),
    ):
        (expected,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        assert torch.equal(grad, expected)
        with pytest.raises(RuntimeError, match="differentiated only once"):
            grad.square().sum().backward(retain_graph=True)
        # Nor does the engine, asked for some gradients only, drop the second derivative beside a first one.
        with pytest.raises(RuntimeError, match="differentiated only once"):
            torch.autograd.grad(out.sum() + grad.square().sum(), q)


def test_double_backward_through_incoming_gradients_and_other_inputs_is_refused():
    """Wherever a gradient depends on something, asking for that derivative alone is an error; a batch whose tensors the
    node had to copy is no exception."""
    x = make_inputs([40, 40])
    batched = [t.detach().unflatten(0, (2, 40)).transpose(1, 2).contiguous().requires_grad_() for t in x.leaves()]
    weight = torch.ones((), requires_grad=True)
    for q, k, call in (
        (x.q, x.k, lambda: varlen(x, 1)),
        (batched[2], batched[3], lambda: flashmsa.flash_msa_func(*batched, 64, 0.125, block_size=BLOCK)[0]),
    ):
        for other in (q, k, weight):
            (grad,) = torch.autograd.grad((weight * call()).square().sum(), q, create_graph=True)
            with pytest.raises(RuntimeError, match="differentiated only once"):
                torch.autograd.grad(grad.square().sum(), other)


def test_strided_offsets_are_refused_at_every_call():
    """Also where a call of the same shapes has gone well before."""
    x = make_inputs([40, 24])
    pairs = torch.tensor([[0, 40], [40, 64]], dtype=torch.int32)
    spaced = torch.stack([x.cu, x.cu + 1], 1)[:, 0]

    def call(cu):
        return flashmsa.flash_msa_varlen_func(x.q, x.k, x.v, x.q_proxy, x.k_proxy, cu, cu, 0, 0, 1, block_size=BLOCK)

    assert torch.equal(call(pairs.T.contiguous()), call(x.cu))
    for cu in (pairs.T, spaced):
        with pytest.raises(ValueError, match="contiguous"):
            call(cu)


def test_empty_call(device):
    x = make_inputs([0, 0], device=device)
    out, kl, lse = varlen(x, 2, return_kl=True, return_lse=True)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (4, 0)
    (out.sum() + kl).backward()
    assert x.q.grad.shape == x.q.shape


@pytest.mark.parametrize("shape", [(0, 64), (2, 0), (0, 0)])
def test_empty_batch(device, shape):
    """A batch without rows or without tokens has results and gradients of its shape."""
    batch, tokens = shape
    leaves = [torch.randn(batch, h, tokens, 64, device=device, requires_grad=True) for h in (2, 1, 4, 2, 2)]
    out, kl = flashmsa.flash_msa_func(*leaves, 128, 0.2, block_size=BLOCK)
    assert out.shape == (batch, tokens, 4 * 64)
    (out.sum() + kl).backward()
    assert all(x.grad.shape == x.shape for x in leaves)


@pytest.mark.parametrize("name", ["block_size", "local_blocks", "init_blocks", "top_k", "max_seqlen_k", "kl_count"])
def test_integers_out_of_range_are_refused(name):
    """They are not cut to the bits that the library has for them."""
    x = make_inputs([70])
    big = 2**64 + 64 if name in ("max_seqlen_k", "kl_count") else 2**32 + 64
    options = {"block_size": BLOCK, "top_k_blocks": 1, "max_seqlen_k": 70}
    options["top_k_blocks" if name == "top_k" else name] = big
    with pytest.raises(ValueError, match=f"{name} is {big}; it must fit in"):
        flashmsa.flash_msa_varlen_func(x.q, x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, 70, **options)


def test_a_block_size_of_zero_is_refused():
    x = make_inputs([70])
    batched = [t.detach()[None].transpose(1, 2) for t in x.leaves()]
    with pytest.raises(ValueError, match="block_size is 0"):
        flashmsa.flash_msa_func(*batched, 128, 0.125, block_size=0)


@pytest.mark.parametrize("name", ["q", "k", "v", "q_proxy", "k_proxy"])
@pytest.mark.parametrize("value", [None, [1.0], torch.ones(70, 2, 64).numpy()])
def test_what_is_no_tensor_is_a_type_error(name, value):
    x = make_inputs([70])
    flashmsa.ops.proxy_loss(
        x.q_proxy, x.k_proxy, x.q, x.k, torch.zeros(4, 70), None, None, x.cu, x.cu, 0, 128, max_seqlen_k=70
    )
    given = {"q": x.q, "k": x.k, "v": x.v, "q_proxy": x.q_proxy, "k_proxy": x.k_proxy, name: value}
    with pytest.raises(TypeError, match=f"^{name} is"):
        flashmsa.flash_msa_varlen_func(
            **given, cu_seqlens_q=x.cu, cu_seqlens_k=x.cu, max_seqlen_q=70, max_seqlen_k=70, top_k_blocks=0
        )


@pytest.mark.parametrize("name", ["k", "v", "q_proxy", "k_proxy"])
@pytest.mark.parametrize("change", ["another S", "another B", "another split of B and S", "no batch"])
def test_tensors_of_another_batch_are_refused(name, change):
    """By name, in eager calls, where operators are called, and for meta tensors."""
    tensors = {n: torch.randn(2, h, 32, 64) for n, h in (("q_proxy", 2), ("k_proxy", 1), ("q", 4), ("k", 2), ("v", 2))}
    changes = {
        "another S": lambda x: x[:, :, :-1],
        "another B": lambda x: x[:1],
        "another split of B and S": lambda x: x.transpose(1, 2).reshape(4, 16, -1, 64).transpose(1, 2),
        "no batch": lambda x: x.transpose(1, 2).flatten(0, 1),
    }
    names = ("k", "v", "k_proxy") if name == "k" else (name,)  # also where the keys agree with each other
    for each in names:
        tensors[each] = changes[change](tensors[each])
    sentence = r"(k|k_proxy|v|q_proxy) has shape .* and q \(2, 4, 32, 64\); all must be|\[batch, heads, tokens, dim\]"

    def sparse(tensors):
        return flashmsa.flash_msa_func(**tensors, top_k=64, scale=0.125, block_size=BLOCK)[0].sum()

    for call in (
        lambda: sparse(tensors),
        lambda: flashmsa.flash_msa_warmup_func(**tensors, top_k=64, scale=0.125),
        lambda: sparse({n: x.to("meta") for n, x in tensors.items()}),
        lambda: functional._attend_by_operators(
            *[tensors[n] for n in ("q_proxy", "k_proxy", "q", "k", "v")],
            functional.Call(
                None,
                torch.tensor([0, 32, 64]).int(),
                torch.tensor([0, 32, 64]).int(),
                functional.Options(0),
                True,
                False,
                False,
                None,
            ),
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


@pytest.mark.parametrize("batched", [False, True])
def test_lazily_negated_tensors_are_read_as_what_they_are(device, batched):
    """Inputs and incoming gradients with PyTorch's negative bit, by the node and by the operators."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            return function(*arguments, **(keywords or {}))

    x = make_inputs([60, 60], device=device)

    def results(negate, watch=contextlib.nullcontext):
        leaves = [t.detach().clone().requires_grad_() for t in x.leaves()]
        given = [negate(t) for t in leaves]
        with watch():
            if batched:
                rows = [t.unflatten(0, (2, 60)).transpose(1, 2) for t in given]
                out, kl = flashmsa.flash_msa_func(*rows, 128, 0.125, block_size=BLOCK, deterministic=True)
            else:
                out, kl = varlen(Inputs(*given, x.cu), 2, return_kl=True, deterministic=True)
            ones = torch.ones_like(out), torch.ones_like(kl)
            torch.autograd.backward([out, kl], [negate(t) for t in ones])
        return [out, kl, *[t.grad for t in leaves]]

    expected = results(torch.neg)
    assert_all_equal(results(torch._neg_view), expected)
    for mine, theirs in zip(results(torch._neg_view, Watch), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["max_seqlen_k", "kl_count", "top_k_blocks", "block_size", "local_blocks"])
def test_options_that_are_no_integers_are_type_errors(name):
    x = make_inputs([70])
    options = {"max_seqlen_k": 70, "top_k_blocks": 1, "block_size": BLOCK}
    for value in (None, 1.0):
        with pytest.raises(TypeError, match=f"^{name} is (NoneType|float); it must be an integer"):
            flashmsa.flash_msa_varlen_func(
                x.q, x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, 70, **{**options, name: value}
            )


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_offsets_that_are_no_tensors_are_type_errors(name):
    x = make_inputs([70])
    for value in (None, [0, 70], x.cu.numpy()):
        cu = {"cu_seqlens_q": x.cu, "cu_seqlens_k": x.cu, name: value}
        with pytest.raises(TypeError, match=f"^{name} is"):
            flashmsa.flash_msa_varlen_func(
                x.q, x.k, x.v, x.q_proxy, x.k_proxy, **cu, max_seqlen_q=70, max_seqlen_k=70, top_k_blocks=1
            )


def test_metrics_and_documents_that_are_no_tensors_are_type_errors():
    x = make_inputs([70])
    batched = [t.detach()[None].transpose(1, 2) for t in x.leaves()]
    with pytest.raises(TypeError, match="kl_metric is float"):
        varlen(x, 1, kl_metric=0.0)
    with pytest.raises(TypeError, match="document_list is list"):
        flashmsa.flash_msa_func(*batched, 128, 0.125, [[0] * 70])


def step_of(x: Inputs):
    """(q_proxy, k_proxy, q, k, v) -> a loss."""

    def loss(*leaves):
        out, kl = varlen(Inputs(*leaves, x.cu), 2, return_kl=True, deterministic=True)
        return out.square().mean() + kl

    return loss


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_torch_func(device):
    """grad and vjp give what backward gives; vmap and jacrev make a call for each example."""
    x = make_inputs([60, 70], device=device)
    loss, plain = step_of(x), [t.detach() for t in x.leaves()]
    if not hasattr(torch._C, "_any_requires_grad"):
        with pytest.raises(NotImplementedError, match="do not work under torch.func"):
            torch.func.grad(loss)(*plain)
        return
    expected = torch.autograd.grad(loss(*x.leaves()), x.leaves())
    value, pullback = torch.func.vjp(loss, *plain)
    for gradients in (torch.func.grad(loss, tuple(range(5)))(*plain), pullback(torch.ones_like(value))):
        assert_all_equal(gradients, expected)
    assert torch.equal(torch.func.jacrev(loss, 2)(*plain), expected[2])
    several = [torch.stack([t, 2 * t]) for t in plain]
    gradients = torch.func.vmap(torch.func.grad(loss, tuple(range(5))))(*several)
    assert_all_equal([g[0] for g in gradients], expected)
    batched = [t.unflatten(0, (2, 65)).transpose(1, 2) for t in plain]
    drop_in = torch.func.grad(lambda v: flashmsa.flash_msa_func(*batched[:4], v, 128, 0.125, block_size=BLOCK)[0].sum())
    assert drop_in(batched[4]).abs().max() > 0


def assert_all_equal(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_transform_leaves_nothing_behind(device):
    """A batch whose shape was first seen under torch.func is computed as ever after it."""
    if not hasattr(torch._C, "_any_requires_grad"):
        pytest.skip("custom operators of this PyTorch do not work under torch.func")
    layer = flashmsa.MSAttention(256, num_heads=4, num_kv_heads=2, block_size=BLOCK, top_k=2).to(device)
    transforms = {
        83: lambda f, *x: torch.func.grad(f)(*x),
        84: lambda f, *x: torch.func.vjp(f, *x),
        85: lambda f, *x: torch.func.vmap(f)(*[t[None] for t in x]),
        86: lambda f, *x: torch.func.functionalize(f)(*x),
    }
    for tokens, transform in transforms.items():
        leaves = [torch.randn(3, h, tokens, 64, device=device) for h in (2, 1, 4, 2, 2)]
        hidden = torch.randn(3, tokens + 10, 256, device=device)

        def of_q(q, leaves=leaves):
            return flashmsa.flash_msa_func(*leaves[:2], q, *leaves[3:], 128, 0.125, block_size=BLOCK)[0].sum()

        def of_hidden(x):
            return layer(x)[0].sum()

        for f, x in ((of_q, leaves[2]), (of_hidden, hidden)):
            with contextlib.suppress(RuntimeError):  # what PyTorch's functionalize says of autograd functions
                transform(f, x)
            y = x.clone().requires_grad_()
            f(y).backward()
            torch.testing.assert_close(torch.func.grad(f)(x), y.grad)


def test_transforms_that_do_not_exist_are_refused():
    """Forward mode and second derivatives, also where the first one's incoming gradient is a constant."""
    x = make_inputs([40])
    loss, plain = step_of(x), [t.detach() for t in x.leaves()]
    fixed = (*plain[:2], *plain[3:])

    def of_q(q):
        return varlen(Inputs(*fixed[:2], q, *fixed[2:], x.cu), 1).sum()

    with pytest.raises(NotImplementedError, match="no forward-mode derivatives|do not work under torch.func"):
        torch.func.jvp(loss, tuple(plain), tuple(plain))
    with pytest.raises(RuntimeError, match="differentiated only once|do not work under torch.func"):
        torch.func.grad(lambda q: torch.func.grad(of_q)(q).square().sum())(plain[2])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(plain[2], plain[2])
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            of_q(dual)


def test_meta_tensors_tell_shapes():
    """Of results and gradients; what does not fit together is refused as it is elsewhere."""
    x = make_inputs([60, 70], device="meta")
    out, kl, lse = flashmsa.flash_msa_varlen_func(
        x.q, x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, 0, 0, 2, block_size=BLOCK, return_kl=True, return_lse=True
    )
    assert (out.shape, kl.shape, lse.shape) == (x.q.shape, (), (4, 130))
    assert all(t.is_meta for t in (out, kl, lse))
    (out.sum() + kl).backward()
    assert all(t.grad.shape == t.shape and t.grad.is_meta for t in x.leaves())
    batched = [t.detach().unflatten(0, (2, 65)).transpose(1, 2).requires_grad_() for t in x.leaves()]
    for function in (flashmsa.flash_msa_func, flashmsa.flash_msa_warmup_func):
        out, kl = function(*batched, 128, 0.125)
        assert out.shape == (2, 65, 4 * 64)
        assert torch.autograd.grad(out.sum() + kl, batched)[3].shape == batched[3].shape
    with pytest.raises(ValueError, match="num_heads is 3"):
        varlen_meta = (x.q[:, :3], x.k, x.v, x.q_proxy, x.k_proxy, x.cu, x.cu)
        flashmsa.flash_msa_varlen_func(*varlen_meta, 0, 0, 2)
    with pytest.raises(ValueError, match="k is on cpu and q_proxy is on meta"):
        flashmsa.flash_msa_varlen_func(x.q, torch.empty(130, 2, 64), x.v, x.q_proxy, x.k_proxy, x.cu, x.cu, 0, 0, 2)


def test_fake_tensors_come_and_go(device):
    """A batch of fake tensors between real ones: offsets that are kept from call to call are not mixed up."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(tokens: int):
        leaves = [torch.ones(3, h, tokens, 64, device=device) for h in (2, 1, 4, 2, 2)]
        return flashmsa.flash_msa_func(*leaves, 128, 0.125, block_size=BLOCK)[0]

    for tokens in (81, 82):
        if tokens == 81:
            assert type(call(tokens)) is torch.Tensor
        with FakeTensorMode():
            assert call(tokens).shape == (3, tokens, 4 * 64)
        torch.testing.assert_close(call(tokens), torch.ones(3, tokens, 4 * 64, device=device))


@pytest.mark.parametrize(
    ("cu", "sentence"),
    [
        ([0, 50, 100, 130], "tokens 50 to 100; it must end .* of 65 tokens ends, at 65"),
        ([0, 130], "tokens 0 to 130; it must end .*, at 65"),
        ([[0, 64], [64, 67]], "tokens 64 to 67; it must end .*, at 65"),
    ],
)
def test_documents_across_sequences_are_refused(cu, sentence):
    x = make_inputs([130])
    batched = [t.detach().unflatten(0, (2, 65)).transpose(1, 2) for t in x.leaves()]
    for function in (flashmsa.flash_msa_func, flashmsa.flash_msa_warmup_func):
        with pytest.raises(ValueError, match=sentence):
            function(*batched, 128, 0.125, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
        function(*batched, 128, 0.125, cu_seqlens=torch.tensor([0, 50, 65, 65, 130], dtype=torch.int32))

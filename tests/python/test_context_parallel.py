"""Context parallelism on 1 to 4 processes against one process, and both against fp64: with gloo on the CPU and on one
card, and with NCCL where there is a card for every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import json
import pathlib
from unittest import mock

import pytest
import torch
from conftest import make_inputs
from ranks import Failed, Ranks

import flashmsa
from flashmsa.context_parallel import ContextParallel, Piece, Plan, WorkModel, attention, proxy_loss, select

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")

REAL = json.loads((pathlib.Path(__file__).parents[1] / "packs_192k.json").read_text())["packs"]
TOP_K = 3
BLOCK, DIM = {"cpu": 16, "cuda": 64}, {"cpu": 32, "cuda": 64}  # the smallest that a device has
NAMES = ("q_proxy", "k_proxy", "q", "k", "v")
GRAD_KL = 1.7


@dataclasses.dataclass(frozen=True)
class Case:
    """A pack with the choices of a call. `pieces` instead of a plan of make_plan: (document, begin, end) by rank."""

    device: str
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    dim: int = 0  # DIM and BLOCK of the device
    block: int = 0
    heads: tuple[int, int, int, int] = (4, 2, 2, 1)
    top_k: int = TOP_K
    padding: int = 0
    pieces: tuple[tuple[tuple[int, int, int], ...], ...] | None = None
    keep_keys: bool = True
    fp32_gradients: bool = True
    two_steps: bool = False
    uses: tuple[str, ...] = ("out", "kl")

    @property
    def block_size(self) -> int:
        return self.block or BLOCK[self.device]

    def inputs(self, device=None):
        """Tensors by name, gradient of the output, offsets."""
        device = device or self.device
        x = make_inputs(list(self.lengths), self.heads, self.dim or DIM[self.device], self.dtype, device)
        nan = torch.nn.functional.pad
        tensors = [nan(t.detach(), (0, 0, 0, 0, 0, self.padding), value=float("nan")) for t in x.leaves()]
        g = torch.Generator().manual_seed(7)
        dout = torch.randn(tensors[2].shape, generator=g, dtype=torch.float64).to(device, self.dtype)
        return dict(zip(NAMES, tensors, strict=True)), dout, x.cu

    def context(self, group=None, world=1):
        cu = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        total = cu[-1] + self.padding
        if self.pieces is None:
            model = WorkModel(1.0, 20.0, 0.0, TOP_K * self.block_size)
            plan = flashmsa.context_parallel.make_plan(cu, world, total=total, model=model)
        else:
            plan = Plan(tuple(cu), total, world, WorkModel(), tuple(tuple(Piece(*p) for p in r) for r in self.pieces))
        return ContextParallel(plan, group, keep_keys=self.keep_keys, fp32_gradients=self.fp32_gradients)


def losses(case: Case, out: torch.Tensor, kl: torch.Tensor, dout: torch.Tensor):
    """What `case` takes gradients of, with the incoming ones."""
    loss = {"out": (out, dout.to(out.dtype)), "kl": (kl, torch.full_like(kl, GRAD_KL))}
    return zip(*[loss[use] for use in case.uses], strict=True)


def alone(case: Case, exact: bool = False, block_indices: torch.Tensor | None = None):
    """The same by one process and without this module; exact: in fp64, on the CPU."""
    tensors, dout, cu = case.inputs("cpu" if exact else None)
    leaves = {name: (x.double() if exact else x).requires_grad_() for name, x in tensors.items()}
    if case.top_k and block_indices is None:
        select_ = flashmsa.ops.select
        block_indices = select_(tensors["q_proxy"], tensors["k_proxy"], cu, cu, case.top_k, case.block_size)
    out, kl, lse = flashmsa.flash_msa_varlen_func(
        leaves["q"], leaves["k"], leaves["v"], leaves["q_proxy"], leaves["k_proxy"], cu, cu, 0, 0, case.top_k,
        block_size=case.block_size, block_indices=block_indices, return_kl=True, return_lse=True,
    )  # fmt: skip
    torch.autograd.backward(*losses(case, out, kl, dout))
    grads = {"d" + name: x.grad for name, x in leaves.items() if x.grad is not None}
    results = {"block_indices": block_indices, "out": out.detach(), "kl": kl.detach(), "lse": lse.t(), **grads}
    return {name: None if x is None else x.cpu() for name, x in results.items()}


def spread(group, case: Case):
    """What a rank computes, put together again: the same dictionary on every rank."""
    context = case.context(group, torch.distributed.get_world_size(group))
    tensors, dout, _ = case.inputs()
    x = {name: context.shard(t).requires_grad_() for name, t in tensors.items()}
    result = {}
    if case.top_k:
        local = select(x["q_proxy"], x["k_proxy"], context, case.top_k, block_size=case.block_size)
        result["block_indices"] = context.unshard(local + 1, 1) - 1
    options = {"block_size": case.block_size, "return_kl": True, "return_lse": True}
    if case.two_steps:
        keys = context.gather(x["k"], x["v"], x["k_proxy"])
        out, kl, lse = keys.attend(x["q"], x["q_proxy"], case.top_k, **options)
    else:
        out, kl, lse = attention(x["q"], x["k"], x["v"], x["q_proxy"], x["k_proxy"], context, case.top_k, **options)
    torch.autograd.backward(*losses(case, out, kl, context.shard(dout)))
    result |= {"out": context.unshard(out), "kl": context.sum(kl), "lse": context.unshard(lse, 1).t()}
    return result | {"d" + n: context.unshard(t.grad) for n, t in x.items() if t.grad is not None}


KINDS = {
    "gathered again": {"keep_keys": False},
    "sums in bf16": {"fp32_gradients": False, "dtype": torch.bfloat16},
    "two steps": {"two_steps": True},
    "dense": {"top_k": 0},
    "dense, gathered again": {"top_k": 0, "keep_keys": False, "dtype": torch.bfloat16},
    "only the output": {"uses": ("out",)},
    "only the loss": {"uses": ("kl",)},
    "fp64": {"dtype": torch.float64},
    "more rows than documents": {"padding": 9},
    "other heads": {"heads": (6, 1, 3, 3), "dtype": torch.bfloat16},
    "blocks of 128": {"dim": 128, "block": 128, "dtype": torch.bfloat16},
}
# Plans whose chunks are cut within blocks and lie in no balance; of four ranks, one has no rows.
BY_HAND = {
    2: (((0, 0, 7), (0, 211, 230), (1, 0, 5), (1, 6, 55)), ((0, 7, 211), (1, 5, 6))),
    4: (((0, 0, 7), (0, 211, 230)), (), ((0, 7, 211), (1, 5, 6)), ((1, 0, 5), (1, 6, 55))),
}


def two_documents(ranks: Ranks, **choices) -> Case:
    block = choices.get("block", BLOCK[ranks.device])
    return Case(ranks.device, (14 * block + 6, 3 * block + 7), **choices)


def needs(ranks: Ranks, count: int) -> None:
    if ranks.most < count:
        pytest.skip(f"needs {count} cards")


def check_rows(name: str, got: torch.Tensor, one: torch.Tensor, exact: torch.Tensor, floor: float) -> None:
    """The error of `got` is at most twice that of `one` and a floor, as a whole and in each row."""
    got, one, exact = (x.double().flatten(1) if x.dim() else x.double().view(1, 1) for x in (got, one, exact))
    if exact.numel() == 0:
        return
    scale = exact[exact.isfinite()].abs().max() if exact.isfinite().any() else 1.0
    same = (got == exact) | (got.isnan() & exact.isnan())
    wrong, allowed = (torch.where(same, 0.0, x - exact).nan_to_num(torch.inf) for x in (got, one))
    assert wrong.norm() <= 2 * allowed.norm() + floor * scale, name
    bound = 2 * allowed.norm(dim=1) + floor * (exact.nan_to_num(0, 0, 0).norm(dim=1) + scale)
    row = int((wrong.norm(dim=1) - bound).argmax())
    assert (wrong.norm(dim=1) <= bound).all(), f"{name}: row {row} is off by {wrong.norm(dim=1)[row]}"


# Sums of the card's fp32 atomics have no order.
FLOORS = {
    "cpu": {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-14},
    "cuda": {torch.float32: 1e-5, torch.bfloat16: 4e-3},
}


def check(ranks: Ranks, case: Case, numbers: tuple[int, ...] = (1, 2, 3, 4)) -> None:
    one = alone(case)
    exact = alone(case, True, one["block_indices"])
    floor = FLOORS[case.device][case.dtype]
    documents = sum(case.lengths)
    for n in sorted({min(n, ranks.most) for n in numbers}):
        answers = ranks.all(n, spread, case)
        assert answers[0].keys() >= {name for name in one if one[name] is not None}
        for answer in answers:
            for name, value in answer.items():
                torch.testing.assert_close(value, answers[0][name], rtol=0, atol=0, equal_nan=True)
        for name, value in answers[0].items():
            if name == "block_indices":
                assert torch.equal(value[:, :documents], one[name][:, :documents])
            elif one.get(name) is None:
                assert (value == 0).all(), f"{name} has a gradient from nowhere"
            elif name == "kl":
                check_rows(name, value, one[name], exact[name], max(floor / 100, FLOORS[case.device][torch.float32]))
            else:
                assert (value[documents:] == 0).all()
                check_rows(name, *(x[:documents] for x in (value, one[name], exact[name])), floor)


EDGE = {
    "one token": lambda b: (1,),
    "empty documents": lambda b: (0, 0, 7, 0, 18 * b + 5),
    "around a block": lambda b: (1, b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, 8 * b - 1, 8 * b, 8 * b + 1),
    "fewer documents than ranks": lambda b: (3, 12 * b + 8),
    "many of three tokens": lambda b: (3,) * 150,
    "one long": lambda b: (32 * b + 5,),
    "long and short": lambda b: (25 * b, 5, 5, 5, 4 * b - 3, 3, 6 * b - 6),
    "nothing": lambda b: (0, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", EDGE)
def test_edge_case_packs(ranks, name, dtype):
    lengths = EDGE[name](BLOCK[ranks.device])
    check(ranks, Case(ranks.device, lengths, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("pack", REAL)
def test_real_packs_scaled_down(ranks, pack, dtype):
    scale = 16 * 256 // BLOCK[ranks.device]
    lengths = tuple((n + scale - 1) // scale for n in REAL[pack])
    check(ranks, Case(ranks.device, lengths, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_calls(ranks, kind):
    case = two_documents(ranks, **KINDS[kind])
    if case.dtype not in FLOORS[ranks.device]:
        pytest.skip(f"no {case.dtype} on {ranks.device}")
    check(ranks, case, (1, 3))


def test_a_plan_by_hand(ranks):
    needs(ranks, 2)
    world = max(n for n in BY_HAND if n <= ranks.most)
    check(ranks, Case(ranks.device, (230, 55), pieces=BY_HAND[world]), (world,))


def of_proxy_loss(group, case: Case):
    context = case.context(group, torch.distributed.get_world_size(group))
    tensors, _, _ = case.inputs()
    x = {name: context.shard(t) for name, t in tensors.items()}
    args = (x["q"], x["k"], x["v"], x["q_proxy"], x["k_proxy"], context, case.top_k)
    block = case.block_size
    indices = select(x["q_proxy"], x["k_proxy"], context, case.top_k, block_size=block) if case.top_k else None
    _, lse = attention(*args, block_size=block, block_indices=indices, return_lse=True)
    kl, dq, dk = proxy_loss(
        x["q_proxy"], x["k_proxy"], x["q"], x["k"], lse, indices, context, block_size=block,
        grad_kl=torch.tensor(GRAD_KL, device=lse.device),
    )  # fmt: skip
    return {"kl": context.sum(kl), "dq_proxy": context.unshard(dq), "dk_proxy": context.unshard(dk)}


def without_proxies(group, case: Case):
    context = case.context(group, torch.distributed.get_world_size(group))
    tensors, dout, _ = case.inputs()
    x = [context.shard(tensors[name]).requires_grad_() for name in ("q", "k", "v")]
    attention(*x, None, None, context, 0).backward(context.shard(dout))
    return [context.unshard(t.grad) for t in x]


def test_dense_attention_without_proxies(ranks):
    case = two_documents(ranks, top_k=0, uses=("out",))
    expected = alone(case)
    for answer in ranks.all(min(3, ranks.most), without_proxies, case):
        for name, value in zip(("dq", "dk", "dv"), answer, strict=True):
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)


def second_derivative(group, case: Case, name: str):
    """What is said when the gradient of one input alone is differentiated."""
    context = case.context(group, torch.distributed.get_world_size(group))
    tensors, _, _ = case.inputs()
    x = {n: context.shard(t) for n, t in tensors.items()}
    x[name].requires_grad_()
    out, kl = attention(*[x[n] for n in ("q", "k", "v", "q_proxy", "k_proxy")], context, case.top_k,
                        block_size=case.block_size, return_kl=True)  # fmt: skip
    (grad,) = torch.autograd.grad(out.float().sum() + kl, x[name], create_graph=True)
    with pytest.raises(RuntimeError) as error:
        grad.square().sum().backward()
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep_keys", [True, False])
def test_second_derivatives_are_refused(ranks, name, keep_keys):
    case = two_documents(ranks, keep_keys=keep_keys)
    for answer in ranks.all(min(ranks.most, 2), second_derivative, case, name):
        assert "differentiated only once" in answer


def of_layer(group, device: str, lengths: list[int], mode: str):
    from flashmsa.module import MSAttention

    torch.manual_seed(0)
    layer = MSAttention(
        64, num_heads=4, num_kv_heads=2, head_dim=DIM[device], block_size=BLOCK[device], top_k=TOP_K, mode=mode
    ).to(device)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    hidden, target = torch.randn(2, sum(lengths), 64).to(device)
    if group is None:
        out, kl = layer(hidden, cu_seqlens=cu.int().to(device))
        (((out - target) ** 2).sum() + kl).backward()
        return [x.cpu() for x in (out, kl, *[p.grad for p in layer.parameters()])]
    context = ContextParallel(cu, group)
    out, kl = layer(context.shard(hidden), context=context)
    (((out - context.shard(target)) ** 2).sum() + kl).backward()
    return [context.unshard(out), context.sum(kl), *[context.sum(p.grad) for p in layer.parameters()]]


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_layer(ranks, mode):
    arguments = (ranks.device, [19 * BLOCK[ranks.device] - 4, 11, 40], mode)
    expected = of_layer(None, *arguments)
    for answer in ranks.all(min(3, ranks.most), of_layer, *arguments):
        for x, y in zip(answer, expected, strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_proxy_loss(ranks, top_k):
    case = two_documents(ranks, top_k=top_k, uses=("kl",))
    expected = alone(case)
    for answer in ranks.all(min(3, ranks.most), of_proxy_loss, case):
        for name, value in answer.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-4)


# ---- Errors -------------------------------------------------------------------------------------------------------


def call_with_error(group, case: Case, kind: str):
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    context = case.context(group, world)
    tensors, _, _ = case.inputs()
    x = [context.shard(tensors[n]) for n in ("q", "k", "v", "q_proxy", "k_proxy")]
    if rank == 1 and kind == "rows":
        x[1] = x[1][:-1]
    if rank == 1 and kind == "dtype":
        x[2] = x[2].double()
    if rank == 1 and kind == "plan":
        other = dataclasses.replace(case, lengths=(case.lengths[0] - 1, case.lengths[1] + 1))
        context = other.context(group, world)
        x = [context.shard(tensors[n]) for n in ("q", "k", "v", "q_proxy", "k_proxy")]
    if rank == 1 and kind == "gradient":
        x[0].requires_grad_()
    top_k = 2 if rank == 1 and kind == "top_k" else TOP_K
    if rank == 1 and kind == "caller":
        context._check(lambda: int("no number"), (), ())
    indices = select(*x[3:], context, TOP_K, block_size=case.block_size) if kind == "later" else None
    if rank == 1 and kind == "later":
        indices = indices.long()
    x[1].requires_grad_()
    with contextlib.ExitStack() as stack:
        if rank == 1 and kind == "travelling":
            stack.enter_context(mock.patch.object(flashmsa.ops, "select", lambda *_: int("no number")))
        attention(*x, context, top_k, block_size=case.block_size, block_indices=indices).sum().backward()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("rows", "k has shape"),
        ("dtype", "v is torch.float64"),
        ("plan", "another plan"),
        ("gradient", "requires_grad"),
        ("top_k", "option"),
        ("caller", "no number"),
        ("travelling", "no number"),
        ("later", "block_indices"),
    ],
)
def test_an_error_on_one_rank_is_told_by_all(ranks, kind, sentence):
    needs(ranks, 2)
    case, world = two_documents(ranks), min(3, ranks.most)
    for rank, answer in enumerate(ranks.run(world, call_with_error, case, kind)):
        assert isinstance(answer, Failed), f"rank {rank} did not fail"
        assert sentence in str(answer), f"rank {rank}: {answer}"
        assert rank == 1 or "group" in str(answer)
    assert ranks.all(world, spread, case)  # and the group is still of use


@pytest.mark.parametrize("world", [2, 5])
def test_a_plan_for_another_group_is_refused(world):
    plan = flashmsa.context_parallel.make_plan([0, 10], world)
    with pytest.raises(ValueError, match=f"the plan is for {world} ranks and the group has 1"):
        ContextParallel(plan)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([1, 5], 2), "cu_seqlens is"),
        (([0, 5, 3], 2), "must ascend"),
        (([0, 5], 0), "world is 0"),
        (([], 1), "cu_seqlens is"),
    ],
)
def test_make_plan_refuses(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        flashmsa.context_parallel.make_plan(*arguments)


@pytest.mark.parametrize("offsets", [[0, 10.5, 20], [0, "10", 20], torch.tensor([0.0, 10.0, 20.0]), 20])
def test_offsets_that_are_no_integers_are_refused(offsets):
    with pytest.raises(TypeError, match="cu_seqlens must be a sequence of integers"):
        ContextParallel(offsets)


# ---- The plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_every_row_has_one_owner(seed):
    g = torch.Generator().manual_seed(seed)

    def random(high):
        return int(torch.randint(high, (), generator=g))

    lengths = [random([1, 2, 200, 5000, 100000][random(5)]) for _ in range(random(40))]
    cu, world = torch.tensor([0, *lengths]).cumsum(0).tolist(), 1 + random(40)
    plan = flashmsa.context_parallel.make_plan(cu, world)
    ends = [0] * len(lengths)
    for piece in sorted((p for pieces in plan.pieces for p in pieces), key=lambda p: (p.document, p.begin)):
        assert piece.begin == ends[piece.document] < piece.end
        ends[piece.document] = piece.end
    assert ends == lengths
    # A rank's work is off by what its documents' cuts are rounded to tokens, and by what was not worth a cut.
    most = max([plan.model.of_rows(n - 1, n) for n in lengths if n], default=0.0)
    assert max(plan.work) <= sum(plan.work) / world * 1.011 + 4 * most


@pytest.mark.parametrize("world", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("pack", REAL)
def test_real_packs_are_balanced(pack, world):
    plan = flashmsa.context_parallel.make_plan([0, *torch.tensor(REAL[pack]).cumsum(0).tolist()], world)
    assert plan.imbalance < 1.01


def test_short_documents_stay_whole():
    plan = flashmsa.context_parallel.make_plan(list(range(0, 1601, 100)), 4)
    assert plan.rows == (400,) * 4
    assert not plan.shared_documents
    assert not any(plan.shared_rows)


def test_a_long_document_is_cut_in_mirrored_pairs():
    plan = flashmsa.context_parallel.make_plan([0, 1 << 20], 8)
    edges = sorted({edge for pieces in plan.pieces for p in pieces for edge in (p.begin, p.end)})
    assert [len(pieces) for pieces in plan.pieces] == [2] * 7 + [1]
    assert [(1 << 20) - edge for edge in reversed(edges)] == edges


def test_examples_in_docstrings():
    for module in (flashmsa.context_parallel, flashmsa._cp_plan):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0

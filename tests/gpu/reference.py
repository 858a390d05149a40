"""The definition evaluated directly in PyTorch, [heads, rows, keys] at once: small cases only.

In fp64 it is what the library is compared with. In fp32 with operands rounded to the inputs' type before each product
it is the same-type evaluation whose error the library may have twice."""

import torch

NEG_INF = float("-inf")


def visibility(p, device):
    """[Tq, Tk] visible, [Tq, Tk] block number of each key within the row's document (-1 where it has none)."""
    visible = torch.zeros(p.total_q, p.total_k, dtype=torch.bool, device=device)
    block = torch.full((p.total_q, p.total_k), -1, dtype=torch.int64, device=device)
    for q0, q1, k0, k1 in p.fragments:
        if q1 == q0 or k1 == k0:
            continue
        position = (k1 - k0) - (q1 - q0) + torch.arange(q1 - q0, device=device)
        key = torch.arange(k1 - k0, device=device)
        visible[q0:q1, k0:k1] = key[None, :] <= position[:, None]
        block[q0:q1, k0:k1] = (key // p.block)[None, :]
    return visible, block


def support(p, block_indices, device):
    """[Hp, Tq, Tk]: the visible keys of the selected blocks."""
    visible, block = visibility(p, device)
    if p.dense:
        return visible[None].expand(p.heads[2], -1, -1)
    last = int(block.max()) + 1 if block.numel() else 0
    chosen = torch.zeros(p.heads[2], p.total_q, last + 2, dtype=torch.bool, device=device)
    index = block_indices.long()
    usable = (index >= 0) & (index < last)
    chosen.scatter_(2, torch.where(usable, index, last + 1), True)
    chosen[..., last:] = False
    return chosen.gather(2, block.clamp(min=0)[None].expand(p.heads[2], -1, -1)) & visible[None]


def proxy_scores(p, x, dtype=torch.float64):
    hp, hpk = p.heads[2:]
    q, k = (x[n].nan_to_num(0, 0, 0).to(dtype) for n in ("q_proxy", "k_proxy"))
    k = k.repeat_interleave(hp // hpk, 1)
    return torch.einsum("qhd,khd->hqk", q, k) * p.proxy_dim**-0.5


def softmax(s, mask):
    s = s.masked_fill(~mask, NEG_INF)
    lse = torch.logsumexp(s, -1)
    probability = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0)[..., None])
    return probability.masked_fill(~mask, 0), lse


@torch.no_grad()
def evaluate(p, x, block_indices, dtype=torch.float64, operand=None):
    """Everything a step computes, unrounded, and the root of the sum of the squares of the terms of each gradient: what
    independent roundings of the terms scale with, however far they cancel. operand: the type that products see, None
    for dtype itself."""
    hq, hkv, hp, hpk = p.heads
    device = x["q"].device

    def clean(name):
        return x[name].nan_to_num(0, 0, 0).to(dtype)

    def rounded(t):
        return t if operand is None else t.to(operand).to(dtype)

    q, k, v, dout = clean("q"), clean("k"), clean("v"), clean("dout")
    qp, kp = clean("q_proxy"), clean("k_proxy")
    per_proxy, group = hq // hp, hq // hkv
    kf, vf, kpf = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), kp.repeat_interleave(hp // hpk, 1)
    mask = support(p, block_indices, device)
    scale, proxy_scale = p.dim**-0.5, p.proxy_dim**-0.5

    a, lse = softmax(torch.einsum("qhd,khd->hqk", q, kf) * scale, mask.repeat_interleave(per_proxy, 0))
    out = torch.einsum("hqk,khd->qhd", rounded(a), vf)
    delta = (dout * rounded(out)).sum(-1).T
    ds = rounded(a * (torch.einsum("qhd,khd->hqk", dout, vf) - delta[..., None]))
    dq = torch.einsum("hqk,khd->qhd", ds, kf) * scale
    dk = torch.einsum("hqk,qhd->khd", ds, q).view(p.total_k, hkv, group, p.dim).sum(2) * scale
    dv = torch.einsum("hqk,qhd->khd", rounded(a), dout).view(p.total_k, hkv, group, p.dim).sum(2)

    per_key = torch.einsum("qhd,khd->hqk", dout**2, vf**2).sqrt()
    terms = a * (per_key + ((dout * out) ** 2).sum(-1).T.sqrt()[..., None])
    dq_terms = torch.einsum("hqk,khd->qhd", terms**2, kf**2).sqrt() * scale
    dk_terms = torch.einsum("hqk,qhd->khd", terms**2, q**2).view(p.total_k, hkv, group, p.dim).sum(2).sqrt() * scale

    w = rounded(a.view(hp, per_proxy, *a.shape[1:]).mean(1))
    sp = torch.einsum("qhd,khd->hqk", qp, kpf) * proxy_scale
    r, student_lse = softmax(sp, mask)
    count = p.kl_count or p.total_q * hp
    log_r = (sp - student_lse.masked_fill(student_lse == NEG_INF, 0)[..., None]).masked_fill(w == 0, 0)
    kl = (torch.xlogy(w, w) - w * log_r).sum() / max(count, 1)
    factor = float(x["grad_kl"]) * proxy_scale / max(count, 1)
    dsp = rounded(r - w)
    dqp = torch.einsum("hqk,khd->qhd", dsp, kpf) * factor
    dkp = torch.einsum("hqk,qhd->khd", dsp, qp).view(p.total_k, hpk, hp // hpk, p.proxy_dim).sum(2) * factor
    terms = r + w
    dqp_terms = torch.einsum("hqk,khd->qhd", terms**2, kpf**2).sqrt() * factor
    dkp_terms = torch.einsum("hqk,qhd->khd", terms**2, qp**2).view(p.total_k, hpk, hp // hpk, p.proxy_dim)
    dkp_terms = dkp_terms.sum(2).sqrt() * factor
    values = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "kl": kl[None], "dq_proxy": dqp, "dk_proxy": dkp}
    return values, {"dq": dq_terms, "dk": dk_terms, "dq_proxy": dqp_terms, "dk_proxy": dkp_terms}


# 16 bits: about one rounding of the output. fp32: tensor cores cut their sums instead of rounding them, about 2^-24 of
# the sum for every eight terms, all in one direction.
FLOOR = {torch.bfloat16: 2.0e-3, torch.float16: 2.5e-4, torch.float32: 5.0e-5}


def compare(p, x, block_indices, outputs):
    """Holds each output to twice the error of the same-type evaluation plus a floor, as a whole and row by row."""
    exact, terms = evaluate(p, x, block_indices)
    peers, _ = evaluate(p, x, block_indices, torch.float32, None if p.dtype == torch.float32 else p.dtype)
    for name, output in outputs.items():
        if name in ("lse", "kl"):
            compare_real(name, output, exact[name], peers[name].double())
        elif output.numel() > 0:
            peer = peers[name].to(output.dtype).double()
            compare_rows(name, output, exact[name], peer, terms.get(name, exact[name]), FLOOR[p.dtype])


def compare_real(name, output, want, peer):
    """lse and kl: absolute, since they are logarithms."""
    got, finite = output.double(), want != NEG_INF
    assert torch.equal(got == NEG_INF, ~finite), f"{name}: -inf in other places"
    if not finite.any():
        return
    got, want, peer = got[finite], want[finite], peer[finite]
    worst, bound = (got - want).abs().max(), 2 * (peer - want).abs().max() + 2e-5 * (1 + want.abs().max())
    assert worst <= bound, f"{name}: off by {worst:.3e}, allowed {bound:.3e}"


def compare_rows(name, output, want, peer, terms, floor):
    got = output.double()
    assert torch.isfinite(got).all(), f"{name}: {(~torch.isfinite(got)).sum()} values are not finite"
    error, peer_error = (got - want).norm(), (peer - want).norm()
    bound = 2 * peer_error + floor * (want.norm() + 0.25 * terms.norm())
    assert error <= bound, f"{name}: error {error:.3e}, allowed {bound:.3e}, norm {want.norm():.3e}"

    def by_row(t):
        return t.flatten(1).norm(dim=1)

    rows, typical = by_row(got - want), peer_error / want.shape[0] ** 0.5
    allowed = 2 * by_row(peer - want) + 2 * typical + floor * (4 * by_row(want) + 2 * by_row(terms))
    bad = (rows > allowed).nonzero().flatten()
    assert len(bad) == 0, f"{name}: row {bad[0]} is off by {rows[bad[0]]:.3e}, allowed {allowed[bad[0]]:.3e}"


def check_selection(p, x, block_indices, tolerance=1e-5):
    """Forced blocks, order and count exactly; scores up to the rounding of their fp32 sums."""
    device = x["q_proxy"].device
    visible, block = visibility(p, device)
    s = proxy_scores(p, x).masked_fill(~visible[None], NEG_INF)
    position = visible.sum(1) - 1
    count = torch.where(position >= 0, position // p.block + 1, 0)  # visible blocks of each row
    blocks = int(count.max()) if count.numel() else 0
    hp = p.heads[2]
    m = torch.full((hp, p.total_q, blocks + 1), NEG_INF, dtype=torch.float64, device=device)
    index = torch.where(visible, block, blocks)[None].expand(hp, -1, -1)
    m.scatter_reduce_(2, index, s, "amax")
    m = m[..., :blocks]
    got = block_indices.long()
    take = count.clamp(max=p.top_k)
    rank = torch.arange(p.top_k, device=device)
    assert torch.equal((got >= 0), (rank[None, :] < take[:, None])[None].expand_as(got)), "wrong number of blocks"
    assert (got < count[None, :, None]).all(), "a block that is not visible"
    both = (got[..., 1:] >= 0) if p.top_k > 1 else None
    assert both is None or (got[..., 1:] > got[..., :-1])[both].all(), "not ascending"
    chosen = torch.zeros(hp, p.total_q, blocks + 1, dtype=torch.bool, device=device)
    chosen.scatter_(2, torch.where(got >= 0, got, blocks), True)
    chosen = chosen[..., :blocks]
    number = torch.arange(blocks, device=device)[None, :]
    local = torch.minimum(take, torch.tensor(p.local_blocks, device=device))
    init_end = torch.minimum(count - local, torch.tensor(p.init_blocks, device=device))
    init_begin = (init_end - (take - local)).clamp(min=0)
    seen = number < count[:, None]
    forced = number >= (count - local)[:, None]
    forced = seen & (forced | ((number >= init_begin[:, None]) & (number < init_end[:, None])))
    assert (chosen | ~forced[None]).all(), "a forced block is missing"
    kept = m.masked_fill(~chosen | forced[None], float("inf")).amin(-1) if blocks else m.sum(-1)
    left = m.masked_fill(chosen | ~seen[None], NEG_INF).amax(-1) if blocks else m.sum(-1)
    margin = tolerance * (1 + s.masked_fill(~visible[None], 0).abs().amax()) if s.numel() else 0
    assert (kept >= left - margin).all(), "a block with a greater score was left out"

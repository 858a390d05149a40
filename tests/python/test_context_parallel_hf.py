"""MiniMax-M3 of transformers over ranks: loss, KL of the layers and gradients of one process."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from test_hf import make_model

from flashmsa import hf
from flashmsa.context_parallel import ContextParallel

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
LENGTHS = [250, 9, 61]


def step(group, device: str):
    """Loss, KL of each layer and gradients; with a group, summed over its ranks."""
    hf.register()
    torch.manual_seed(0)
    model = make_model(device=device, last_mlp="dense").train()
    model.set_attn_implementation("flashmsa")
    proxy = hf.enable_proxy_loss(model, weight=0.5)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    ids = torch.randint(model.config.vocab_size, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    labels = ids.roll(-1, 1)
    labels[0, cu[1:] - 1] = -100
    items = int((labels != -100).sum())
    ids, labels = ids.to(device), labels.to(device)
    if group is None:
        context, total = None, lambda x: x.detach().cpu()
        positions = torch.cat([torch.arange(n) for n in LENGTHS]).to(device)[None]
        offsets = cu.int().to(device)
        arguments = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        labels = labels.roll(1, 1)  # the model shifts them itself
    else:
        context = ContextParallel(cu, group)
        total = context.sum
        ids, labels = context.shard(ids, 1), context.shard(labels, 1)
        positions = context.positions(device)[None]
        arguments = {"context_parallel": context, "shift_labels": labels}
    loss = model(
        ids, position_ids=positions, labels=labels, num_items_in_batch=items, use_cache=False,
        **arguments,
    ).loss  # fmt: skip
    loss.backward()
    return {
        "loss": total(loss),
        "kl": total(torch.stack(list(proxy.layers.values()))),
        **{name: total(p.grad) for name, p in model.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("world", [2, 3])
def test_model(ranks, world):
    expected, atol = step(None, ranks.device), {"cpu": 1e-5, "cuda": 1e-4}[ranks.device]
    assert len(expected["kl"]) == 2
    for answer in ranks.all(min(world, ranks.most), step, ranks.device):
        assert answer.keys() == expected.keys()
        for name, value in answer.items():
            torch.testing.assert_close(value, expected[name], atol=atol, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")

"""Times a training step of attention (forward and backward) with flashmsa beside what else can be had, in one run.

    python bench/peers.py [--heads 64/4/4/1] [--tokens 4096,8192,...] [--top-k 16] [--out results/peers_<card>.json]

Peers that cannot be imported are skipped with a word; none of them is a dependency. Needs a CUDA card and flashmsa.
  flashmsa         selection, schedule, forward, backward, KL value and proxy gradients, through flash_msa_varlen_func
  flashmsa warm-up dense attention, and proxies that learn from every visible key
  cudnn            dense causal attention of cuDNN, through PyTorch
  fa4              dense causal attention of FlashAttention-4 (pip install flash-attn-4)
  flash-msa        sparse attention and proxy gradients of Flash-MSA (pip install flash-msa); without a KL value

Every peer runs by itself for a while in each round, so that it is measured in steady state and all share the card's
clocks and power; first calls, which compile, are not counted. A figure is a median, in milliseconds."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
BF16, DIM = torch.bfloat16, 128

Pass = Callable[[], object]


@dataclasses.dataclass
class Shape:
    heads: tuple[int, int, int, int]  # query, key/value, proxy query, proxy key
    tokens: int
    top_k: int  # blocks of 128 keys

    def tensors(self, layout: str) -> list[torch.Tensor]:
        """q, k, v, q_proxy, k_proxy and dout as leaves: [tokens, heads, dim], with a 1 in front ("bthd"), or
        [1, heads, tokens, dim] ("bhtd")."""
        hq, hkv, hp, hpk = self.heads
        result = []
        for heads in (hq, hkv, hkv, hp, hpk, hq):
            shape = (1, heads, self.tokens, DIM) if layout == "bhtd" else (self.tokens, heads, DIM)
            x = torch.randn(shape, device="cuda", dtype=BF16)
            result.append((x[None] if layout == "bthd" else x).requires_grad_())
        return result


def passes(
    forward: Callable[[], tuple[torch.Tensor, ...]], inputs: list[torch.Tensor], *grads: torch.Tensor
) -> tuple[Pass, Pass]:
    """The forward pass, and the backward pass of the outputs that the last forward pass left."""
    last: list[tuple[torch.Tensor, ...]] = []

    def run_forward() -> None:
        last[:] = [forward()]

    def run_backward() -> None:
        torch.autograd.grad(last[0], inputs, grads)

    return run_forward, run_backward


def flashmsa_peer(shape: Shape, top_k: int | None = None) -> tuple[Pass, Pass]:
    import flashmsa

    q, k, v, q_proxy, k_proxy, dout = shape.tensors("thd")
    cu = torch.tensor([0, shape.tokens], device="cuda", dtype=torch.int32)
    kl_metric = torch.zeros((), device="cuda")
    blocks = shape.top_k if top_k is None else top_k

    def forward() -> tuple[torch.Tensor, ...]:
        return flashmsa.flash_msa_varlen_func(
            q, k, v, q_proxy, k_proxy, cu, cu, shape.tokens, shape.tokens, blocks,
            return_kl=True, kl_value=False, kl_metric=kl_metric,
        )  # fmt: skip

    return passes(forward, [q, k, v, q_proxy, k_proxy], dout.detach(), torch.ones((), device="cuda"))


def warmup_peer(shape: Shape) -> tuple[Pass, Pass]:
    return flashmsa_peer(shape, top_k=0)


def cudnn_peer(shape: Shape) -> tuple[Pass, Pass]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, _, _, dout = shape.tensors("bhtd")

    def forward() -> tuple[torch.Tensor, ...]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return (torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),)

    return passes(forward, [q, k, v], dout.detach())


def fa4_peer(shape: Shape) -> tuple[Pass, Pass]:
    from flash_attn.cute import flash_attn_func

    q, k, v, _, _, dout = shape.tensors("bthd")

    def forward() -> tuple[torch.Tensor, ...]:
        out = flash_attn_func(q, k, v, causal=True)
        return (out[0] if isinstance(out, tuple) else out,)

    return passes(forward, [q, k, v], dout.detach())


def flash_msa_peer(shape: Shape) -> tuple[Pass, Pass]:
    from flash_msa import flash_msa_func

    q, k, v, q_proxy, k_proxy, _ = shape.tensors("bhtd")
    dout = torch.randn(1, shape.tokens, shape.heads[0] * DIM, device="cuda", dtype=BF16)

    def forward() -> tuple[torch.Tensor, ...]:
        return flash_msa_func(q_proxy, k_proxy, q, k, v, shape.top_k * 128, DIM**-0.5)

    out, kl = forward()
    return passes(forward, [q, k, v, q_proxy, k_proxy], dout.view_as(out), torch.ones_like(kl))


PEERS: dict[str, Callable[[Shape], tuple[Pass, Pass]]] = {
    "flashmsa": flashmsa_peer,
    "flashmsa warm-up": warmup_peer,
    "cudnn": cudnn_peer,
    "fa4": fa4_peer,
    "flash-msa": flash_msa_peer,
}


def turn(forward: Pass, backward: Pass, seconds: float) -> list[tuple[float, float]]:
    """Milliseconds of forward and backward of the second half of a turn of two steps or more."""
    events, start = [], time.monotonic()
    while time.monotonic() - start < seconds or len(events) < 2:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        forward()
        marks[1].record()
        backward()
        marks[2].record()
        events.append(marks)
        if len(events) > 2:
            events[-3][2].synchronize()
    torch.cuda.synchronize()
    return [(a.elapsed_time(b), b.elapsed_time(c)) for a, b, c in events[len(events) // 2 :]]


def compare(
    shape: Shape, names: list[str], skipped: dict[str, str], rounds: int, seconds: float
) -> list[dict[str, object]]:
    """A row for each peer that runs; why the others do not goes to skipped."""
    ready: dict[str, tuple[Pass, Pass]] = {}
    for name in names:
        if name in skipped:
            continue
        try:
            ready[name] = PEERS[name](shape)
            for one_pass in ready[name]:
                one_pass()
            torch.cuda.synchronize()
        except Exception as error:  # a peer may fail in any way of its own
            ready.pop(name, None)
            skipped[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"{name} is left out: {skipped[name]}", flush=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    for i in range(rounds):
        for name in ready if i % 2 == 0 else reversed(ready):
            times[name] += turn(*ready[name], seconds)
    rows: list[dict[str, object]] = []
    for name, pairs in times.items():
        forward, backward = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append(
            {
                "peer": name,
                "heads": "/".join(map(str, shape.heads)),
                "tokens": shape.tokens,
                "forward_ms": round(forward, 4),
                "backward_ms": round(backward, 4),
                "step_ms": round(statistics.median(f + b for f, b in pairs), 4),
            }
        )
    return rows


def command(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    card = torch.cuda.get_device_name(0)
    parser.add_argument("--heads", default="64/4/4/1", help="query/key/proxy query/proxy key heads")
    parser.add_argument("--tokens", default="4096,8192,16384,32768,65536", help="lengths of one document")
    parser.add_argument("--top-k", type=int, default=16, help="blocks of 128 keys")
    parser.add_argument("--peers", default=",".join(PEERS), help="which to run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25, help="length of a turn")
    parser.add_argument("--commit", default=None, help="what the report calls the commit; from git by default")
    parser.add_argument("--out", default=str(ROOT / "results" / f"peers_{card.split()[-1].lower()}.json"))
    options = parser.parse_args()
    hq, hkv, hp, hpk = (int(n) for n in options.heads.split("/"))
    skipped: dict[str, str] = {}
    rows: list[dict[str, object]] = []
    report = {
        "commit": options.commit or command("git", "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "card": card,
        "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "top_k": options.top_k,
        "dtype": "bf16",
        "skipped": skipped,
        "rows": rows,
    }
    print(f"{'peer':18}{'tokens':>9}{'forward ms':>12}{'backward ms':>13}{'step ms':>10}")
    for tokens in (int(n) for n in options.tokens.split(",")):
        shape = Shape((hq, hkv, hp, hpk), tokens, options.top_k)
        for row in compare(shape, options.peers.split(","), skipped, options.rounds, options.seconds):
            print(
                f"{row['peer']:18}{tokens:9,}{row['forward_ms']:12.3f}{row['backward_ms']:13.3f}{row['step_ms']:10.3f}"
            )
            rows.append(row)
        pathlib.Path(options.out).write_text(json.dumps(report, indent=2) + "\n")
        torch.cuda.empty_cache()
    print(f"{len(rows)} rows written to {options.out}")


if __name__ == "__main__":
    main()

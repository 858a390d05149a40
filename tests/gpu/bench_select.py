"""Block selection on Hopper: scores and top-k beside cuBLAS, FP8 beside bf16, and how much of a selection FP8 keeps."""

import csv
import itertools
import os
import pathlib
import subprocess
import tempfile

import numpy as np
import torch
from fmsa import ROOT, SELECT, SELECT_FP8, Call, Problem, documents
from measure import BF16, GEMM_FLOP, M3, gemm_task, steady

PROXY_DIM, TOP_K, L2_BYTES = 128, 16, 60 << 20
LENGTHS = {"8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536, "256k": 262144}

# A model whose proxies the kernel can take: heads of 128 and key blocks of 128 bytes, 4 of up to 16.
TRAINED_TOP_K, TRAINED_SECONDS = 4, 30
TRAINED = {
    "--context": 2048, "--block": 128, "--top-k": TRAINED_TOP_K, "--layers": 2, "--batch": 1, "--proxy-heads": 2,
    "--proxy-head-dim": PROXY_DIM, "--seconds": TRAINED_SECONDS,
}  # fmt: skip


class Selections:
    """Calls of select over rotating random inputs, more than twice the L2 cache: one document of `tokens` rows."""

    def __init__(self, tokens, flags=0):
        _, _, proxy_heads, proxy_key_heads = M3
        self.problem = Problem(M3, documents([tokens]), BF16, proxy_dim=PROXY_DIM, top_k=TOP_K, flags=flags)
        self.flop = 2 * PROXY_DIM * proxy_heads * tokens * (tokens + 1) / 2
        size = tokens * (proxy_heads + proxy_key_heads) * PROXY_DIM * 2
        self.calls = []
        for seed in range(max(2, -(-2 * L2_BYTES // size))):
            g = torch.Generator(device="cuda").manual_seed(seed)
            shapes = {"q_proxy": proxy_heads, "k_proxy": proxy_key_heads}
            inputs = {
                name: torch.randn(tokens, heads, PROXY_DIM, generator=g, device="cuda").to(BF16)
                for name, heads in shapes.items()
            }
            call = Call(self.problem, inputs)
            self.calls.append((call, call.prepare(SELECT, ["block_indices"])))

    def __call__(self, i):
        call, prepared = self.calls[i % len(self.calls)]
        call.enqueue(SELECT, prepared)

    def indices(self):
        """[Hp, T, k] of the first inputs."""
        self(0)
        torch.cuda.synchronize()
        return self.calls[0][0].outputs["block_indices"]


def recall(got, want, block):
    """The share of the blocks that scores chose in `want` that are also in `got`: the token's own block, which is
    always chosen, does not count, nor do tokens that see no more blocks than they choose."""
    heads, tokens, top_k = want.shape
    own = (torch.arange(tokens, device=want.device) // block)[None, :, None]
    by_score = (want >= 0) & (want != own) & (own >= top_k)
    found = torch.zeros_like(by_score)
    for rank in range(top_k):
        found |= want == got[..., rank, None]
    return (found & by_score).sum().item() / by_score.sum().item()


def bench_rates(figures):
    tasks = {"gemm": gemm_task()}
    for label, tokens in LENGTHS.items():
        tasks[label] = Selections(tokens)
    tasks["fp8"] = Selections(LENGTHS["64k"], SELECT_FP8)
    ms = steady(tasks, rounds=4, seconds=0.2)
    gemm = GEMM_FLOP / ms["gemm"]
    shape = "scores + top-k, 4 proxy heads on 1 key head, D 128, k 16, bf16, random inputs"
    for label in LENGTHS:
        rate = tasks[label].flop / ms[label]
        figures[f"scores.bf16.tflops.{label}"] = (rate / 1e9, "TFLOP/s", f"{shape}, {LENGTHS[label]:,} tokens")
        if label in ("64k", "256k"):
            figures[f"scores.bf16.over_cublas.{label}"] = (rate / gemm, "x", f"{shape}; over torch.mm 8192^3")
    figures["scores.fp8.tflops.64k"] = (tasks["fp8"].flop / ms["fp8"] / 1e9, "TFLOP/s", f"{shape} with SELECT_FP8")
    figures["scores.fp8.over_bf16.64k"] = (ms["64k"] / ms["fp8"], "x", "time in bf16 over time in FP8, all included")
    wanted, got = tasks["64k"].indices(), tasks["fp8"].indices()
    figures["scores.fp8.recall.gaussian"] = (
        recall(got, wanted, 128),
        "",
        "share of the blocks chosen by bf16 scores that FP8 chooses too; random inputs, 65,536 tokens, k 16",
    )


def trained_proxies():
    """[layers, batch, context, Hp + Hpk, Dp] of a model that `flashmsa train` trains on this repository's text, and a
    sentence on how far it came."""
    tool = os.environ.get("FLASHMSA_TOOL", ROOT / "build" / "gpu" / "tools" / "flashmsa")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "proxies.npy"
        options = {**TRAINED, "--out": folder, "--proxies": file}
        command = [tool, "train", *itertools.chain(*options.items())]
        subprocess.run([str(c) for c in command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        with open(pathlib.Path(folder) / "train.csv") as records:
            last = list(csv.DictReader(records))[-1]
        state = "{step} steps, validation loss {validation_loss}, block recall {block_recall}".format(**last)
        return np.load(file), state


def bench_trained(figures):
    numbers, state = trained_proxies()
    proxies = torch.from_numpy(numbers).cuda().to(BF16)
    recalls = []
    for sequence in proxies.flatten(0, 1):
        p = Problem((2, 1, 2, 1), documents([len(sequence)]), BF16, proxy_dim=PROXY_DIM, top_k=TRAINED_TOP_K)
        inputs = {"q_proxy": sequence[:, :2].contiguous(), "k_proxy": sequence[:, 2:].contiguous()}
        wanted = Call(p, inputs).select()
        p.flags = SELECT_FP8
        recalls.append(recall(Call(p, inputs).select(), wanted, p.block))
    figures["scores.fp8.recall.trained"] = (
        sum(recalls) / len(recalls),
        "",
        f"the same on a model trained by `flashmsa train`: 2,048 bytes, 4 of up to 16 blocks, all layers; {state}",
    )


def measure(figures):
    bench_rates(figures)
    torch.cuda.empty_cache()
    bench_trained(figures)


if __name__ == "__main__":
    measured = {}
    measure(measured)
    for name, (value, unit, _) in measured.items():
        print(f"{name:44} {value:10.4f} {unit}")

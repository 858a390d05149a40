"""What a call of the Python package costs the host: forward and backward with the KL loss on tensors so small that the
card hardly works. FLASHMSA_LIBRARY names the library.

`measure` adds figures for results/<card>.json. Run as a program, this prints them beside what PyTorch's own machinery
costs with the same tensors."""

import contextlib
import os
import statistics
import subprocess
import sys
import time

import fmsa  # noqa: F401  (puts the package on the path)
import torch

import flashmsa
from flashmsa import _library, functional

TOKENS, HEADS, TOP_K = 256, (16, 2, 4, 1), 2
ROUNDS, STEPS = 40, 10  # the card catches up after each round of steps, so that the host never waits within one


def leaves(batched=False, device="cuda"):
    hq, hkv, hp, hpk = HEADS
    tensors = []
    for heads in (hp, hpk, hq, hkv, hkv):
        x = torch.randn(TOKENS, heads, 128, device=device, dtype=torch.bfloat16)
        tensors.append((x[None].transpose(1, 2) if batched else x).detach().requires_grad_())
    return tensors


def host_us(*steps, rounds=ROUNDS, inner=STEPS):
    """The host time of each step in microseconds, by turns so that all meet the same machine: the lower quartile of
    single calls, since whatever else runs on the host only adds."""
    times = [[] for _ in steps]
    for _ in range(rounds):
        for step, taken in zip(steps, times, strict=True):
            torch.cuda.synchronize()
            for _ in range(inner):
                start = time.perf_counter()
                step()
                taken.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return [statistics.quantiles(taken, n=4)[0] for taken in times]


class Steps:
    """Training steps through each of the package's doors."""

    def __init__(self):
        self.packed, self.batched = leaves(), leaves(batched=True)
        self.cu = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")
        self.dout = torch.randn(TOKENS, HEADS[0], 128, device="cuda", dtype=torch.bfloat16)
        self.dout_batched = self.dout.view(1, TOKENS, -1)
        self.grad_kl = torch.ones((), device="cuda")

    def varlen(self, kl_value=False):
        q_proxy, k_proxy, q, k, v = self.packed
        out, kl = flashmsa.flash_msa_varlen_func(
            q, k, v, q_proxy, k_proxy, self.cu, self.cu, TOKENS, TOKENS, TOP_K, return_kl=True, kl_value=kl_value
        )
        torch.autograd.grad([out, kl], self.packed, [self.dout, self.grad_kl])

    def drop_in(self, kl_value=False):
        out, kl = flashmsa.flash_msa_func(*self.batched, TOP_K * 128, 128**-0.5, kl_value=kl_value)
        torch.autograd.grad([out, kl], self.batched, [self.dout_batched, self.grad_kl])

    def operators(self):
        options = functional.Options(TOP_K, max_seqlen_k=TOKENS)
        call = functional.Call(None, self.cu, self.cu, options, True, False, False, None)
        out, kl = functional._attend_by_operators(*self.packed, call)
        torch.autograd.grad([out, kl], self.packed, [self.dout, self.grad_kl])


@contextlib.contextmanager
def without_library():
    """The C library's operations do nothing meanwhile: what is left is Python's and PyTorch's time."""
    real = _library.RUN
    _library.RUN = tuple((lambda *_: 0) for _ in real)
    try:
        yield
    finally:
        _library.RUN = real


def empty_function(tensors, dout, grad_kl):
    """An autograd.Function that does nothing but hand back tensors it had already."""
    hq, out, kl = HEADS[0], torch.empty_like(dout), torch.zeros((), device="cuda")
    lse, grads = torch.empty(hq, TOKENS, device="cuda"), [torch.empty_like(x) for x in tensors]

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q_proxy, k_proxy, q, k, v, cu):
            ctx.save_for_backward(q_proxy, k_proxy, q, k, v, out, lse, cu)
            return out.detach(), kl.detach(), lse

        @staticmethod
        def backward(ctx, dout, dkl, dlse):
            ctx.saved_tensors  # noqa: B018
            return (*grads, None)

    def step():
        o, loss, _ = Empty.apply(*tensors, grad_kl)
        torch.autograd.grad([o, loss], tensors, [dout, grad_kl])

    return step


def empty_operators(tensors, dout, grad_kl):
    """A pair of custom operators that do nothing, joined by register_autograd."""
    out, kl = torch.empty_like(dout), torch.zeros((), device=dout.device)
    lse, grads = torch.empty(HEADS[0], TOKENS, device=dout.device), [torch.empty_like(x) for x in tensors]
    five = "Tensor q_proxy, Tensor k_proxy, Tensor q, Tensor k, Tensor v"

    @torch.library.custom_op("flashmsa_bench::forward", mutates_args=(), schema=f"({five}) -> (Tensor, Tensor, Tensor)")
    def forward(q_proxy, k_proxy, q, k, v):
        return out.detach(), kl.detach(), lse.detach()

    results = ", ".join(["Tensor"] * 5)
    schema = f"(Tensor dout, Tensor dkl, {five}, Tensor out, Tensor lse) -> ({results})"

    @torch.library.custom_op("flashmsa_bench::backward", mutates_args=(), schema=schema)
    def backward(dout, dkl, q_proxy, k_proxy, q, k, v, out, lse):
        return tuple(x.detach() for x in grads)

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[0], output[2])

    forward.register_autograd(lambda ctx, d, g, _: backward(d, g, *ctx.saved_tensors), setup_context=setup)

    def step():
        o, loss, _ = forward(*tensors)
        torch.autograd.grad([o, loss], tensors, [dout, grad_kl])

    return step


FIRST_CALL = """
import time, torch
torch.ones(8, device="cuda").sum().item()
start = time.perf_counter()
import flashmsa
q_proxy, k_proxy, q, k, v = [
    torch.randn(777, h, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (4, 1, 16, 2, 2)
]
cu = torch.tensor([0, 500, 777], dtype=torch.int32, device="cuda")
out, kl = flashmsa.flash_msa_varlen_func(q, k, v, q_proxy, k_proxy, cu, cu, 0, 0, 4, return_kl=True)
(out.float().sum() + kl).backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_call_ms():
    """In a process of its own where the driver and PyTorch have started, but nothing of this package has."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, env=environment)
    return float(result.stdout) * 1e3


def measure(figures):
    """Adds name -> (value, unit, how)."""
    steps = Steps()
    empty = empty_function(steps.packed, steps.dout, steps.grad_kl)
    varlen, drop_in = host_us(steps.varlen, steps.drop_in)
    with without_library():
        python, python_drop_in, nothing = host_us(steps.varlen, steps.drop_in, empty)
    what = f"{'/'.join(map(str, HEADS))} heads, {TOKENS} tokens, bf16: forward and backward with KL, kl_value=False"
    figures |= {
        "python.overhead.us": (python, "us", f"host time of flash_msa_varlen_func, C library left out; {what}"),
        "python.overhead.drop_in.us": (python_drop_in, "us", f"the same of flash_msa_func; {what}"),
        "python.overhead.over_empty_function": (
            python / nothing,
            "x",
            "python.overhead.us over python.empty_function.us",
        ),
        "python.step.us": (varlen, "us", f"host time of flash_msa_varlen_func with all launches; {what}"),
        "python.step.drop_in.us": (drop_in, "us", f"the same of flash_msa_func; {what}"),
        "python.first_call.ms": (first_call_ms(), "ms", "import, first forward and first backward pass, to the end"),
        "python.empty_function.us": (nothing, "us", "an autograd.Function that does nothing, with these tensors"),
    }


def main():
    figures = {}
    measure(figures)
    for name, (value, unit, how) in figures.items():
        print(f"{name:32} {value:8.1f} {unit}  {how}")
    steps = Steps()
    pair = empty_operators(steps.packed, steps.dout, steps.grad_kl)
    by_operators, empty_pair, with_value = host_us(steps.operators, pair, lambda: steps.varlen(kl_value=True))
    print(f"{'by operators':32} {by_operators:8.1f} us")
    print(f"{'an empty pair of operators':32} {empty_pair:8.1f} us")
    print(f"{'with the KL value forward':32} {with_value:8.1f} us")


if __name__ == "__main__":
    main()

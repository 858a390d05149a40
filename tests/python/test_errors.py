"""Mistakes a caller makes: each is refused with a sentence that names the argument."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from conftest import make_inputs

import flashmsa


def call(x, top_k=2, **changes):
    arguments = {"cu_seqlens_q": x.cu, "cu_seqlens_k": x.cu, "max_seqlen_q": 0, "max_seqlen_k": 0, "block_size": 64}
    tensors = {"q": x.q, "k": x.k, "v": x.v, "q_proxy": x.q_proxy, "k_proxy": x.k_proxy}
    return flashmsa.flash_msa_varlen_func(**{**tensors, **arguments, "top_k_blocks": top_k, **changes})


CASES = {
    "not a tensor": (TypeError, "k_proxy is list", {"k_proxy": [1.0]}),
    "q not a tensor": (TypeError, "q is NoneType", {"q": None}),
    "dtype mix": (TypeError, "v is torch.float16 and q_proxy is torch.float32", {"v": lambda x: x.v.half()}),
    "dtype": (
        TypeError,
        "q has dtype torch.int64",
        {n: (lambda x, n=n: getattr(x, n).detach().long()) for n in ("q", "k", "v", "q_proxy", "k_proxy")},
    ),
    "rank": (ValueError, r"q has shape \(1, 100, 4, 64\)", {"q": lambda x: x.q[None]}),
    "tokens": (ValueError, "q_proxy has shape .* as many tokens", {"q_proxy": lambda x: x.q_proxy[:50]}),
    "v heads": (ValueError, "v has shape .* as many heads", {"v": lambda x: x.v[:, :1]}),
    "dimension": (
        ValueError,
        "k has head dimension 32 and q 64",
        {"k": lambda x: x.k[..., :32], "v": lambda x: x.v[..., :32]},
    ),
    "heads": (ValueError, "num_heads", {"q": lambda x: x.q[:, :3]}),
    "last dimension": (ValueError, "q has strides .* last dimension", {"q": lambda x: x.q.mT.contiguous().mT}),
    "cu_seqlens dtype": (
        TypeError,
        "cu_seqlens_q is torch.int64; it must be an int32",
        {"cu_seqlens_q": lambda x: x.cu.long()},
    ),
    "cu_seqlens shape": (ValueError, "cu_seqlens_k has shape", {"cu_seqlens_k": lambda x: x.cu[None, None]}),
    "cu_seqlens lengths": (
        ValueError,
        "cu_seqlens_q holds 1 fragments and cu_seqlens_k 2",
        {"cu_seqlens_k": torch.tensor([0, 50, 100], dtype=torch.int32)},
    ),
    "cu_seqlens descend": (ValueError, "q_begin|q_end", {"cu_seqlens_q": torch.tensor([100, 0], dtype=torch.int32)}),
    "top_k": (ValueError, "top_k_blocks is -1", {"top_k": -1}),
    "softmax_scale": (ValueError, "softmax_scale is nan", {"softmax_scale": float("nan")}),
    "proxy_scale": (ValueError, "proxy_scale is -1.0", {"proxy_scale": -1.0}),
    "block_size": (ValueError, "block_size", {"block_size": 3}),
    "block_indices dtype": (TypeError, "block_indices must be an int32", {"block_indices": torch.zeros(2, 100, 2)}),
    "block_indices shape": (
        ValueError,
        "block_indices has shape",
        {"block_indices": torch.zeros(2, 100, 3, dtype=torch.int32)},
    ),
    "block_indices future": (ValueError, "block", {"block_indices": torch.ones(2, 100, 2, dtype=torch.int32)}),
    "kl_metric": (TypeError, "kl_metric is torch.float64", {"kl_metric": torch.zeros((), dtype=torch.float64)}),
    "kl_metric device": (
        ValueError,
        "kl_metric is on meta; it must be on cpu",
        {"kl_metric": torch.zeros((), device="meta")},
    ),
    "meta device": (ValueError, "on meta", {"k": lambda x: x.k.to("meta")}),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    error, sentence, changes = CASES[name]
    x = make_inputs([100])
    changes = {key: value(x) if callable(value) else value for key, value in changes.items()}
    with pytest.raises(error, match=sentence):
        call(x, **changes)


def test_drop_in_top_k():
    x = [t.detach()[None].transpose(1, 2) for t in make_inputs([256]).leaves()]
    for top_k in (0, -128, 100):
        with pytest.raises(ValueError, match=f"top_k is {top_k}; it counts tokens"):
            flashmsa.flash_msa_func(*x, top_k, 0.1)
    with pytest.raises(ValueError, match="both given"):
        flashmsa.flash_msa_func(*x, 128, 0.1, torch.zeros(1, 256, dtype=torch.int32), cu_seqlens=torch.zeros(2))
    with pytest.raises(ValueError, match="document_list has shape"):
        flashmsa.flash_msa_func(*x, 128, 0.1, torch.zeros(1, 255, dtype=torch.int32))
    with pytest.raises(ValueError, match="scale is 0"):
        flashmsa.flash_msa_func(*x, 128, 0.0)


def test_schedule_and_top_k_agree():
    x = make_inputs([100])
    indices = flashmsa.ops.select(x.q_proxy, x.k_proxy, x.cu, x.cu, 2, 64)
    schedule = flashmsa.ops.schedule(indices, x.q, x.k, x.cu, x.cu, 64)
    with pytest.raises(ValueError, match="schedule is missing"):
        flashmsa.ops.forward(x.q, x.k, x.v, None, x.cu, x.cu, 2, 2, 64)
    with pytest.raises(ValueError, match="dense attention has none"):
        flashmsa.ops.forward(x.q, x.k, x.v, schedule, x.cu, x.cu, 2, 0, 64)
    with pytest.raises(RuntimeError, match="schedule has"):
        flashmsa.ops.forward(x.q, x.k, x.v, schedule[:-64], x.cu, x.cu, 2, 2, 64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_devices_lists_the_cpu():
    assert len(flashmsa.devices()) == 1


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_import_needs_no_torch():
    code = "import sys, flashmsa; flashmsa.build_info(); print('torch' in sys.modules, flashmsa.__version__)"
    assert run_python(code).stdout.split() == ["False", flashmsa.build_info()["version"]]


@pytest.mark.parametrize("order", ["import torch, flashmsa", "import flashmsa, torch"])
def test_import_order(order):
    code = f"{order}\nx = torch.randn(8, 1, 16); cu = torch.tensor([0, 8], dtype=torch.int32)\n"
    code += "print(flashmsa.flash_msa_varlen_func(x, x, x, x, x, cu, cu, 8, 8, 1, block_size=16).shape)"
    assert run_python(code).stdout == "torch.Size([8, 1, 16])\n"


def test_missing_library_is_named():
    result = run_python("import flashmsa", FLASHMSA_LIBRARY=str(pathlib.Path("nowhere") / "libflashmsa.so"))
    assert "ImportError: flashmsa cannot load its library nowhere/libflashmsa.so" in result.stderr


def test_examples_in_docstrings():
    import doctest

    from flashmsa import _library, functional, module, ops

    modules = [_library, functional, module, ops]
    if importlib.util.find_spec("transformers"):
        modules.append(flashmsa.hf)
    for each in modules:
        result = doctest.testmod(each)
        assert result.attempted > 0, each
        assert result.failed == 0, each


def test_every_public_name_has_an_example():
    """Functions and classes that users call; the operators share the one of their module."""
    names = {name: getattr(flashmsa, name) for name in flashmsa.__all__ if name != "ops"}
    for name, x in names.items():
        assert ">>>" in (x.__doc__ or ""), name

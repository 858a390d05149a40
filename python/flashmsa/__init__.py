"""Training kernels for MiniMax Sparse Attention.

Importing this package loads the C library and nothing else; PyTorch is imported with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._library import build_info, devices

if TYPE_CHECKING:
    from . import ops
    from .functional import (
        document_offsets,
        flash_msa_func,
        flash_msa_func_warmup,
        flash_msa_varlen_func,
        flash_msa_warmup_func,
        sparse_attention_warmup,
    )
    from .module import MSAttention

__version__ = build_info()["version"]

_FUNCTIONS = (
    "document_offsets",
    "flash_msa_func",
    "flash_msa_func_warmup",
    "flash_msa_varlen_func",
    "flash_msa_warmup_func",
    "sparse_attention_warmup",
)
_MODULES = ("ops", "functional", "module", "hf", "context_parallel")

__all__ = [
    "MSAttention",
    "build_info",
    "devices",
    "document_offsets",
    "flash_msa_func",
    "flash_msa_func_warmup",
    "flash_msa_varlen_func",
    "flash_msa_warmup_func",
    "ops",
    "sparse_attention_warmup",
]


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        functional = importlib.import_module(".functional", __name__)
        globals().update({each: getattr(functional, each) for each in _FUNCTIONS})
        return globals()[name]
    if name == "MSAttention":
        return importlib.import_module(".module", __name__).MSAttention
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})

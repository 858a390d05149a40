"""What a call needs that follows from shapes alone, kept from call to call: the configuration and the sizes of scratch.

A training step makes the same calls again and again, so the host's share of one is kept small: configurations are
checked once a shape, and the two structures that the library reads are put together as bytes, never changed in place,
so that threads can share everything here.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import _library

DTYPES = {
    torch.bfloat16: _library.DTYPE_BF16,
    torch.float16: _library.DTYPE_FP16,
    torch.float32: _library.DTYPE_FP32,
    torch.float64: _library.DTYPE_FP64,
}


class Options(NamedTuple):
    """The choices of a call: fmsa_config without shapes and places. 0 stands for the library's default."""

    top_k: int  # blocks; 0 = dense mode
    block_size: int = 128
    local_blocks: int = 1
    init_blocks: int = 0
    softmax_scale: float = 0.0
    proxy_scale: float = 0.0
    max_seqlen_k: int = 0
    kl_count: int = 0
    flags: int = 0

    @property
    def dense(self) -> bool:
        """Whether attention runs over every visible key."""
        return self.top_k == 0


class Geometry(NamedTuple):
    """The shapes of a call, and where it runs."""

    batch: tuple[int, int] | None  # rows, and the tokens of each; None for packed tensors
    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    proxy_heads: int
    proxy_kv_heads: int
    head_dim: int
    proxy_head_dim: int
    total_q: int
    total_k: int
    fragments: int


def _check_range(geometry: Geometry, options: Options) -> None:
    """Refuses options that are no integers, and integers that fmsa_config cannot hold, which ctypes would cut."""
    for name, number in options._asdict().items():
        if not name.endswith("scale") and not hasattr(number, "__index__"):
            raise TypeError(f"{name} is {type(number).__name__}; it must be an integer")
    for value in (geometry, options):
        for name, number in value._asdict().items():
            bits = 64 if name in _WIDE else 32
            if isinstance(number, int) and not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
                raise ValueError(f"{name} is {number}; it must fit in {bits} bits")


_WIDE = ("kl_count", "max_seqlen_k", "total_q", "total_k", "fragments")


def _aligned(size: int) -> int:
    """Bytes up to the next multiple of 256, the alignment that the library asks of memory."""
    return (size + 255) // 256 * 256


class Plan:
    """One geometry with one set of options."""

    def __init__(self, geometry: Geometry, options: Options) -> None:
        if geometry.dtype not in DTYPES:
            raise TypeError(f"q has dtype {geometry.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
        _check_range(geometry, options)
        config = _library.new_config()
        if geometry.device.type == "cuda":
            config.device, config.device_index = _library.DEVICE_CUDA, geometry.device.index
        elif geometry.device.type in ("cpu", "meta"):
            config.num_threads = min(torch.get_num_threads(), 1024)
        else:
            raise ValueError(f"q is on {geometry.device}; tensors must be on a CPU or CUDA device")
        config.dtype = DTYPES[geometry.dtype]
        config.mode = _library.MODE_DENSE if options.dense else _library.MODE_SPARSE
        config.flags = options.flags
        config.num_heads, config.num_kv_heads = geometry.heads, geometry.kv_heads
        config.num_proxy_heads, config.num_proxy_kv_heads = geometry.proxy_heads, geometry.proxy_kv_heads
        config.head_dim, config.proxy_head_dim = geometry.head_dim, geometry.proxy_head_dim
        config.block_size, config.top_k = options.block_size, max(options.top_k, 1) if options.dense else options.top_k
        config.local_blocks, config.init_blocks = options.local_blocks, options.init_blocks
        config.softmax_scale, config.proxy_scale = options.softmax_scale, options.proxy_scale
        config.kl_count, config.max_seqlen_k = options.kl_count, options.max_seqlen_k
        config.total_q, config.total_k = geometry.total_q, geometry.total_k
        config.num_fragments = geometry.fragments

        self.geometry = geometry
        self.top_k = config.top_k
        self.real = torch.float64 if geometry.dtype == torch.float64 else torch.float32
        self.kv_grad = torch.float32 if options.flags & _library.FLAG_FP32_KV_GRADS else geometry.dtype
        self.schedule_bytes = _library.schedule_bytes(config)
        self.lse_offset = _aligned(self.schedule_bytes)
        self.indices_bytes = _aligned(4 * geometry.proxy_heads * geometry.total_q * self.top_k)
        self.on_cuda = geometry.device.type == "cuda"
        self._config = config
        self._tensors: dict[object, array[int]] = {}
        self._results = self._result_strides()
        self._shells: dict[object, torch.Tensor] = {}
        # The latest configuration with the places that it holds: in training, those of the next call too.
        self._latest: tuple[tuple[int, ...], bytes] = ((), b"")
        raw, stream, bounds = bytes(config), _library.Config.stream.offset, _library.Config.q_begin.offset
        word = struct.calcsize("P")
        self._before_stream = raw[:stream]
        self._before_bounds = raw[stream + word : bounds]
        self._after_bounds = raw[bounds + 4 * word :]

    def _result_strides(self) -> array[int]:
        """An fmsa_tensors without pointers, with the strides that results have: tokens one after the other, each with
        all its heads; lse and block_indices with a head's tokens one after the other."""
        g = self.geometry
        words = array("q", bytes(ctypes.sizeof(_library.Tensors)))
        words[0] = ctypes.sizeof(_library.Tensors)
        for field, heads, dim in (
            (OUT, g.heads, g.head_dim),
            (DOUT, g.heads, g.head_dim),
            (DQ, g.heads, g.head_dim),
            (DK, g.kv_heads, g.head_dim),
            (DV, g.kv_heads, g.head_dim),
            (DQ_PROXY, g.proxy_heads, g.proxy_head_dim),
            (DK_PROXY, g.proxy_kv_heads, g.proxy_head_dim),
        ):
            words[field + 1], words[field + 2] = heads * dim, dim
        words[LSE + 1], words[LSE + 2] = 1, g.total_q
        words[BLOCK_INDICES + 1], words[BLOCK_INDICES + 2] = self.top_k, g.total_q * self.top_k
        return words

    def tensors(
        self,
        q_proxy: torch.Tensor | None,
        k_proxy: torch.Tensor | None,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
    ) -> array[int]:
        """An fmsa_tensors that reads these and has the strides of contiguous results; the caller sets what else the
        operation takes."""
        strides = tuple([None if x is None else x.stride() for x in (q_proxy, k_proxy, q, k, v)])
        template = self._tensors.get(strides)
        if template is None:
            template = self._tensors[strides] = self._with_strides(q_proxy, k_proxy, q, k, v)
        words = template[:]
        if q_proxy is not None:
            words[Q_PROXY] = q_proxy.data_ptr()
        if k_proxy is not None:
            words[K_PROXY] = k_proxy.data_ptr()
        if q is not None:
            words[Q] = q.data_ptr()
        if k is not None:
            words[K] = k.data_ptr()
        if v is not None:
            words[V] = v.data_ptr()
        return words

    def _with_strides(self, *inputs: torch.Tensor | None) -> array[int]:
        words = self._results[:]
        for name, field, x in zip(_NAMES, _INPUTS, inputs, strict=False):
            if x is not None:
                words[field + 1], words[field + 2] = token_strides(name, x)
        return words

    def empty(self, result: object) -> torch.Tensor:
        """A new tensor for a result, named by its field of fmsa_tensors; for KEPT; or, for a tuple of operations,
        scratch that is enough for each of them. Made after a tensor of its shape and strides that has no memory, which
        costs half of what naming shape, type and device does."""
        shell = self._shells.get(result)
        if shell is None:
            shape, dtype = self._shape(result)
            shell = torch.empty(shape, dtype=dtype, device=self.geometry.device)
            if self.geometry.batch is not None and result in _GRADIENTS:
                shell = shell.transpose(1, 2)
            shell.untyped_storage().resize_(0)
            self._shells[result] = shell
        return torch.empty_like(shell)

    def _shape(self, result: object) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape in memory: tokens before heads."""
        g = self.geometry
        if isinstance(result, tuple):
            size = max(_library.workspace_bytes(self._config, operation) for operation in result)
            # A selection that is read by what runs after it lies before the scratch of both.
            selects = _library.SELECT in result and len(result) > 1
            return (size + (self.indices_bytes if selects else 0),), torch.uint8
        if result == KL:
            return (), self.real
        if result == KEPT:
            return (self.lse_offset + g.heads * g.total_q * self.real.itemsize,), torch.uint8
        if result == LSE:
            return (g.heads, g.total_q), self.real
        if result == BLOCK_INDICES:
            return (g.proxy_heads, g.total_q, self.top_k), torch.int32
        if result in (DK, DV, DK_PROXY):
            heads, dim = (g.proxy_kv_heads, g.proxy_head_dim) if result == DK_PROXY else (g.kv_heads, g.head_dim)
            tokens = g.total_k
            dtype = self.kv_grad
        else:
            heads, dim = (g.proxy_heads, g.proxy_head_dim) if result == DQ_PROXY else (g.heads, g.head_dim)
            tokens = g.total_q
            dtype = g.dtype
        if g.batch is None:
            return (tokens, heads, dim), dtype
        if result == OUT:
            return (*g.batch, heads * dim), dtype
        return (*g.batch, heads, dim), dtype

    def config(self, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> bytes:
        """The configuration for the current stream and these fragments."""
        stream = current_stream(self.geometry.device.index) if self.on_cuda else 0
        places = (stream, *bounds(cu_seqlens_q), *bounds(cu_seqlens_k))
        known, config = self._latest
        if known != places:
            config = b"".join(
                (
                    self._before_stream,
                    _POINTER.pack(stream),
                    self._before_bounds,
                    _POINTERS.pack(*places[1:]),
                    self._after_bounds,
                )
            )
            self._latest = (places, config)
        return config


_POINTER, _POINTERS = struct.Struct("@P"), struct.Struct("@PPPP")

# An fmsa_tensors is an array of 8-byte words: where each field's data pointer stands in it. The words behind a view's
# pointer are its strides.
_WORD = 8
Q, K, V, Q_PROXY, K_PROXY, BLOCK_INDICES, SCHEDULE, SCHEDULE_BYTES = [
    getattr(_library.Tensors, name).offset // _WORD
    for name in ("q", "k", "v", "q_proxy", "k_proxy", "block_indices", "schedule", "schedule_bytes")
]
OUT, LSE, DOUT, DQ, DK, DV, DQ_PROXY, DK_PROXY, GRAD_KL, KL = [
    getattr(_library.Tensors, name).offset // _WORD
    for name in ("out", "lse", "dout", "dq", "dk", "dv", "dq_proxy", "dk_proxy", "grad_kl", "kl")
]

# What the backward pass of the autograd node needs besides inputs and out: the schedule, and lse `lse_offset` bytes
# behind its begin.
KEPT = "kept"
_GRADIENTS = (DQ, DK, DV, DQ_PROXY, DK_PROXY)

_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device_index: int) -> int:
    """PyTorch's current stream of a card, as a cudaStream_t."""
    if _raw_stream is not None:
        return _raw_stream(device_index)
    return torch.cuda.current_stream(device_index).cuda_stream


def bounds(cu_seqlens: torch.Tensor) -> tuple[int, int]:
    """Where the begins and the ends of fragments lie: offsets [n + 1] are both, a [2, n] tensor has a row of each."""
    begin = cu_seqlens.data_ptr()
    return begin, begin + 4 * (1 if cu_seqlens.dim() == 1 else cu_seqlens.stride(0))


def fragment_count(name: str, cu_seqlens: torch.Tensor, device: torch.device) -> int:
    """Checks offsets or bounds of fragments and counts the fragments."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype != torch.int32:
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{name} is {kind}; it must be an int32 tensor")
    if cu_seqlens.device != device:
        raise ValueError(f"{name} is on {cu_seqlens.device}; it must be on {device}, where q is")
    shape = tuple(cu_seqlens.shape)
    if cu_seqlens.dim() == 1 and shape[0] >= 1:
        if shape[0] > 1 and cu_seqlens.stride(0) != 1:
            raise ValueError(f"{name} has stride {cu_seqlens.stride(0)}; it must be contiguous")
        return shape[0] - 1
    if cu_seqlens.dim() == 2 and shape[0] == 2:
        if shape[1] > 1 and cu_seqlens.stride(1) != 1:
            raise ValueError(f"{name} has strides {tuple(cu_seqlens.stride())}; its last dimension must be contiguous")
        return shape[1]
    raise ValueError(f"{name} has shape {shape}; it must be [n + 1] offsets, or [2, n] begins and ends of n fragments")


def run(operation: int, config: bytes, tensors: array[int], workspace: int, workspace_bytes: int) -> None:
    """Enqueues one operation."""
    status = _library.RUN[operation](config, tensors.buffer_info()[0], workspace, workspace_bytes)
    if status:
        _library.fail(status)


_plans: dict[object, Plan] = {}
_MOST_PLANS = 4096
_NAMES = ("q_proxy", "k_proxy", "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
_INPUTS = (Q_PROXY, K_PROXY, Q, K, V)


def plan_of(
    q_proxy: torch.Tensor | None,
    k_proxy: torch.Tensor | None,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: Options,
    proxy_heads: int = 0,
) -> Plan:
    """The plan of a call with these tensors, packed [tokens, heads, dim] or batched [batch, heads, tokens, dim].

    Either the proxies or the main tensors may be missing; without q_proxy, `proxy_heads` counts its heads. Raises
    TypeError and ValueError for tensors that do not fit together.
    """
    tensors = (q_proxy, k_proxy, q, k, v, cu_seqlens_q, cu_seqlens_k)
    try:
        shapes = tuple([None if x is None else (x.shape, x.dtype, x.device) for x in tensors])
        # The library reads offsets as they lie in memory, so their strides are checked for every new value of them.
        bounds_strides = (cu_seqlens_q.stride(), cu_seqlens_k.stride())
    except AttributeError:
        _refuse_other_types(tensors)
        raise
    key = (shapes, bounds_strides, options, proxy_heads, torch.get_num_threads())
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(_geometry(*tensors, proxy_heads), options)
    return plan


def _refuse_other_types(values: tuple[object, ...]) -> None:
    for name, value in zip(_NAMES, values, strict=True):
        missing = value is None and not name.startswith("cu_seqlens")
        if not missing and not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is {type(value).__name__}; it must be a tensor")


def _packed_shape(x: torch.Tensor) -> tuple[int, int, int]:
    """Tokens, heads and dimension."""
    if x.dim() == 3:
        return x.shape[0], x.shape[1], x.shape[2]
    return x.shape[0] * x.shape[2], x.shape[1], x.shape[3]


def check_batch(given: dict[str, torch.Tensor]) -> None:
    """Refuses tensors [B, H, S, D] whose B and S are not those of q: one set of offsets serves queries and keys."""
    q = given["q"]
    for name, x in given.items():
        if x.dim() != 4 or x.shape[0] != q.shape[0] or x.shape[2] != q.shape[2]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and q {tuple(q.shape)}; all must be [B, H, S, D] with the "
                "same B and S"
            )


def _check_alike(given: dict[str, torch.Tensor]) -> None:
    first, reference = next(iter(given.items()))
    for name, x in given.items():
        if x.dtype != reference.dtype:
            raise TypeError(f"{name} is {x.dtype} and {first} is {reference.dtype}; they must have one dtype")
        if x.device != reference.device:
            raise ValueError(f"{name} is on {x.device} and {first} is on {reference.device}; they must share a device")
        if x.dim() not in (3, 4) or x.dim() != reference.dim():
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; tensors must be [tokens, heads, dim], or all of them "
                "[batch, heads, tokens, dim]"
            )
    if reference.dim() == 4:
        check_batch(given)
    for name, other in (("q_proxy", "q"), ("k_proxy", "k"), ("v", "k")):
        if name not in given or other not in given:
            continue
        x, y = given[name], given[other]
        if _packed_shape(x)[0] != _packed_shape(y)[0]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and {other} {tuple(y.shape)}; they must have as many tokens"
            )
    for name, other in (("v", "k"), ("k_proxy", "q_proxy"), ("k", "q")):
        if name in given and other in given and given[name].shape[-1] != given[other].shape[-1]:
            raise ValueError(
                f"{name} has head dimension {given[name].shape[-1]} and {other} {given[other].shape[-1]}; they must "
                "be equal"
            )
    if "v" in given and "k" in given and given["v"].shape != given["k"].shape:
        raise ValueError(
            f"v has shape {tuple(given['v'].shape)} and k {tuple(given['k'].shape)}; they must have as many heads"
        )


def _geometry(
    q_proxy: torch.Tensor | None,
    k_proxy: torch.Tensor | None,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    proxy_heads: int,
) -> Geometry:
    """Checks that the tensors agree, and reads the shapes off them. What is missing takes the shape of its other."""
    given = {name: x for name, x in zip(_NAMES, (q_proxy, k_proxy, q, k, v), strict=False) if x is not None}
    _check_alike(given)
    reference = next(iter(given.values()))
    fragments = fragment_count("cu_seqlens_q", cu_seqlens_q, reference.device)
    key_fragments = fragment_count("cu_seqlens_k", cu_seqlens_k, reference.device)
    if fragments != key_fragments:
        raise ValueError(
            f"cu_seqlens_q holds {fragments} fragments and cu_seqlens_k {key_fragments}; they must hold as many"
        )
    query, key = (q if q is not None else q_proxy), (k if k is not None else k_proxy)
    assert query is not None
    assert key is not None
    total_q, query_heads, dim = _packed_shape(query)
    total_k, key_heads, _ = _packed_shape(key)
    if q_proxy is not None:
        proxy_heads = _packed_shape(q_proxy)[1]
    return Geometry(
        batch=(query.shape[0], query.shape[2]) if query.dim() == 4 else None,
        dtype=reference.dtype,
        device=reference.device,
        heads=query_heads,
        kv_heads=key_heads if k is not None else proxy_heads,
        proxy_heads=proxy_heads,
        proxy_kv_heads=1 if k_proxy is None else _packed_shape(k_proxy)[1],
        head_dim=dim,
        proxy_head_dim=dim if q_proxy is None else q_proxy.shape[-1],
        total_q=total_q,
        total_k=total_k,
        fragments=fragments,
    )


def packable(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its tokens lie a constant step apart, else a copy. Only a batch can need one."""
    if x.dim() == 4:
        batch, _, tokens, _ = x.shape
        if batch > 1 and tokens > 1 and x.stride(0) != tokens * x.stride(2):
            return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x


def token_strides(name: str, x: torch.Tensor) -> tuple[int, int]:
    """Strides of tokens and heads. That of a dimension of size 1 has no meaning, and is not told."""
    shape, stride = x.shape, x.stride()
    if stride[-1] != 1 and shape[-1] != 1:
        raise ValueError(f"{name} has strides {tuple(stride)}; its last dimension must be contiguous")
    head = stride[1] if shape[1] > 1 else 0
    if len(shape) == 3:
        return stride[0] if shape[0] > 1 else 0, head
    return stride[2] if shape[2] > 1 else stride[0] if shape[0] > 1 else 0, head

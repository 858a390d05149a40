"""The C library by ctypes: where it lies, its structures, its errors.

Nothing here needs PyTorch. The structures mirror include/flashmsa.h field by field.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from typing import NoReturn

OK, ARGUMENT, UNSUPPORTED, WORKSPACE, DEVICE, CUDA = range(6)
DEVICE_CPU, DEVICE_CUDA = range(2)
DTYPE_BF16, DTYPE_FP16, DTYPE_FP32, DTYPE_FP64 = range(4)
MODE_SPARSE, MODE_DENSE = range(2)
SELECT, SCHEDULE, FORWARD, PROXY_LOSS, BACKWARD, BACKWARD_WITH_PROXY = range(6)
FLAG_DETERMINISTIC, FLAG_SELECT_FP8, FLAG_CHECK_FRAGMENTS, FLAG_FP32_KV_GRADS = 1, 2, 4, 8


class TensorView(ctypes.Structure):
    """fmsa_tensor."""

    _fields_ = [("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class Config(ctypes.Structure):
    """fmsa_config."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("num_proxy_heads", ctypes.c_int32),
        ("num_proxy_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("proxy_head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("local_blocks", ctypes.c_int32),
        ("init_blocks", ctypes.c_int32),
        ("softmax_scale", ctypes.c_double),
        ("proxy_scale", ctypes.c_double),
        ("kl_count", ctypes.c_int64),
        ("total_q", ctypes.c_int64),
        ("total_k", ctypes.c_int64),
        ("num_fragments", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64),
        ("q_begin", ctypes.c_void_p),
        ("q_end", ctypes.c_void_p),
        ("k_begin", ctypes.c_void_p),
        ("k_end", ctypes.c_void_p),
        ("scratch_limit", ctypes.c_size_t),
    ]


class Tensors(ctypes.Structure):
    """fmsa_tensors."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("q", TensorView),
        ("k", TensorView),
        ("v", TensorView),
        ("q_proxy", TensorView),
        ("k_proxy", TensorView),
        ("block_indices", TensorView),
        ("schedule", ctypes.c_void_p),
        ("schedule_bytes", ctypes.c_size_t),
        ("out", TensorView),
        ("lse", TensorView),
        ("dout", TensorView),
        ("dq", TensorView),
        ("dk", TensorView),
        ("dv", TensorView),
        ("dq_proxy", TensorView),
        ("dk_proxy", TensorView),
        ("grad_kl", ctypes.c_void_p),
        ("kl", ctypes.c_void_p),
    ]


def library_path() -> pathlib.Path:
    """The shared library: the one that FLASHMSA_LIBRARY names, or the one that came with this package."""
    named = os.environ.get("FLASHMSA_LIBRARY")
    if named:
        return pathlib.Path(named)
    # An editable installation has the Python files in one folder and the library in another.
    folders = [pathlib.Path(folder) for folder in sys.modules[__package__].__path__]
    paths = [folder / "lib" / "libflashmsa.so" for folder in folders]
    return next((path for path in paths if path.exists()), paths[-1])


def _load() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"flashmsa cannot load its library {path} ({error}): install the package with `pip install .`, or set "
            "FLASHMSA_LIBRARY to a libflashmsa.so that was built with CMake"
        ) from error
    config, size = ctypes.POINTER(Config), ctypes.c_size_t
    sizes = ctypes.POINTER(ctypes.c_size_t)
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "fmsa_last_error": (ctypes.c_char_p, []),
        "fmsa_version": (ctypes.c_char_p, []),
        "fmsa_build_info": (ctypes.c_char_p, []),
        "fmsa_device_count": (ctypes.c_int32, [ctypes.c_int]),
        "fmsa_device_description": (ctypes.c_int, [ctypes.c_int, ctypes.c_int32, ctypes.c_char_p, size]),
        "fmsa_config_init": (None, [config, size]),
        "fmsa_workspace_bytes": (ctypes.c_int, [config, ctypes.c_int, sizes]),
        "fmsa_schedule_bytes": (ctypes.c_int, [config, sizes]),
    }
    # The operations take the two structures as bytes (see _plan.py) or by reference.
    for name in ("select", "schedule", "forward", "proxy_loss", "backward", "backward_with_proxy"):
        signatures[f"fmsa_{name}"] = (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, size])
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


lib = _load()

RUN = (
    lib.fmsa_select,
    lib.fmsa_schedule,
    lib.fmsa_forward,
    lib.fmsa_proxy_loss,
    lib.fmsa_backward,
    lib.fmsa_backward_with_proxy,
)


def fail(status: int) -> NoReturn:
    """Raises the library's last error: ValueError for arguments, NotImplementedError (a RuntimeError) for what this
    build or card cannot run, RuntimeError for the rest."""
    sentence = lib.fmsa_last_error().decode()
    if status == ARGUMENT:
        raise ValueError(sentence)
    if status == UNSUPPORTED:
        raise NotImplementedError(sentence)
    raise RuntimeError(sentence)


def new_config() -> Config:
    """A configuration with every field at its default."""
    config = Config()
    lib.fmsa_config_init(ctypes.byref(config), ctypes.sizeof(config))
    return config


def workspace_bytes(config: Config, operation: int) -> int:
    """Bytes of scratch that the operation needs."""
    size = ctypes.c_size_t()
    status = lib.fmsa_workspace_bytes(ctypes.byref(config), operation, ctypes.byref(size))
    if status != OK:
        fail(status)
    return size.value


def schedule_bytes(config: Config) -> int:
    """Bytes of the schedule; 0 in dense mode."""
    size = ctypes.c_size_t()
    status = lib.fmsa_schedule_bytes(ctypes.byref(config), ctypes.byref(size))
    if status != OK:
        fail(status)
    return size.value


def build_info() -> dict[str, str]:
    """What the library was built from and for: version, compiler, backends, CUDA toolkit and architectures.

    Example:
        >>> import flashmsa
        >>> "cpu" in flashmsa.build_info()["backends"].split(",")
        True
    """
    lines = lib.fmsa_build_info().decode().splitlines()
    info = dict(line.split("=", 1) for line in lines if "=" in line)
    return {**info, "library": str(library_path())}


def devices() -> list[str]:
    """One line for each device that can be used: the CPU, then the cards that the driver shows.

    Example:
        >>> import flashmsa
        >>> len(flashmsa.devices()) >= 1
        True
    """
    lines = []
    for kind in (DEVICE_CPU, DEVICE_CUDA):
        for index in range(lib.fmsa_device_count(kind)):
            text = ctypes.create_string_buffer(512)
            status = lib.fmsa_device_description(kind, index, text, len(text))
            if status != OK:
                fail(status)
            lines.append(text.value.decode())
    return lines

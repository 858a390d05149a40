"""libflashmsa by ctypes, for the GPU tests: every buffer is poisoned before a call and guarded around it."""

import ctypes
import dataclasses
import os
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The structures and signatures are the Python package's, which need not be installed.
sys.path.insert(0, str(ROOT / "python"))
os.environ.setdefault("FLASHMSA_LIBRARY", str(ROOT / "build" / "gpu" / "src" / "libflashmsa.so"))
from flashmsa._library import RUN, Config, Tensors, TensorView, lib  # noqa: E402

OK, ARGUMENT, UNSUPPORTED, WORKSPACE, DEVICE, CUDA_ERROR = range(6)
SELECT, SCHEDULE, FORWARD, PROXY_LOSS, BACKWARD, BACKWARD_WITH_PROXY = range(6)
DETERMINISTIC, SELECT_FP8, CHECK_FRAGMENTS, FP32_KV_GRADS, PORTABLE, KEY_OUTER, QUERY_OUTER = 1, 2, 4, 8, 16, 32, 64
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float64: 3}
GUARD = 4096  # bytes before and behind every buffer
POISON = 0xFF  # NaN in every floating-point type, -1 in every integer
VIEWS = ("q", "k", "v", "q_proxy", "k_proxy", "block_indices")
RESULTS = ("out", "lse", "dout", "dq", "dk", "dv", "dq_proxy", "dk_proxy")


class Failure(Exception):
    def __init__(self, status):
        super().__init__(f"status {status}: {lib.fmsa_last_error().decode()}")
        self.status = status


def check(status):
    if status != OK:
        raise Failure(status)


@dataclasses.dataclass
class Problem:
    """A configuration; fragments are rows (q_begin, q_end, k_begin, k_end)."""

    heads: tuple  # Hq, Hkv, Hp, Hpk
    fragments: list
    dtype: torch.dtype = torch.bfloat16
    dim: int = 128
    proxy_dim: int = 128
    block: int = 128
    top_k: int = 4
    local_blocks: int = 1
    init_blocks: int = 0
    dense: bool = False
    flags: int = 0
    total_q: int = -1
    total_k: int = -1
    max_seqlen_k: int = 0
    scratch_limit: int = 0
    kl_count: int = 0
    device: str = "cuda"

    def __post_init__(self):
        if self.total_q < 0:
            self.total_q = max([f[1] for f in self.fragments], default=0)
        if self.total_k < 0:
            self.total_k = max([f[3] for f in self.fragments], default=0)
        columns = [list(c) for c in zip(*self.fragments)] or [[], [], [], []]
        self.arrays = [torch.tensor(c, dtype=torch.int32, device=self.device) for c in columns]

    def config(self):
        c = Config()
        lib.fmsa_config_init(ctypes.byref(c), ctypes.c_size_t(ctypes.sizeof(c)))
        c.device = 1 if self.device == "cuda" else 0
        if self.device == "cuda":
            c.stream = torch.cuda.current_stream().cuda_stream
        c.dtype, c.mode, c.flags = DTYPES[self.dtype], int(self.dense), self.flags
        c.num_heads, c.num_kv_heads, c.num_proxy_heads, c.num_proxy_kv_heads = self.heads
        c.head_dim, c.proxy_head_dim, c.block_size, c.top_k = self.dim, self.proxy_dim, self.block, self.top_k
        c.local_blocks, c.init_blocks = self.local_blocks, self.init_blocks
        c.total_q, c.total_k, c.num_fragments = self.total_q, self.total_k, len(self.fragments)
        c.max_seqlen_k, c.scratch_limit, c.kl_count = self.max_seqlen_k, self.scratch_limit, self.kl_count
        c.q_begin, c.q_end, c.k_begin, c.k_end = (a.data_ptr() for a in self.arrays)
        return c


def documents(lengths):
    """Fragments of packed documents."""
    fragments, at = [], 0
    for length in lengths:
        fragments.append((at, at + length, at, at + length))
        at += length
    return fragments


class Buffer:
    """Poisoned memory with guard zones around it."""

    def __init__(self, size, device):
        self.whole = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
        self.bytes = self.whole[GUARD : GUARD + size]

    def poison(self):
        self.whole.fill_(POISON)

    def intact(self):
        return bool((self.whole[:GUARD] == POISON).all() and (self.whole[GUARD + len(self.bytes) :] == POISON).all())

    def view(self, shape, dtype):
        return self.bytes.view(dtype).view(shape)


class Call:
    """The operations of one problem, with outputs, schedule and workspace of its own."""

    def __init__(self, problem, inputs):
        self.p, self.inputs, self.buffers = problem, dict(inputs), {}
        p = problem
        hq, hkv, hp, hpk = p.heads
        grads = torch.float32 if p.flags & FP32_KV_GRADS else p.dtype
        real = torch.float64 if p.dtype == torch.float64 else torch.float32
        self.shapes = {
            "block_indices": ((hp, p.total_q, p.top_k), torch.int32),
            "out": ((p.total_q, hq, p.dim), p.dtype),
            "lse": ((hq, p.total_q), real),
            "dq": ((p.total_q, hq, p.dim), p.dtype),
            "dk": ((p.total_k, hkv, p.dim), grads),
            "dv": ((p.total_k, hkv, p.dim), grads),
            "dq_proxy": ((p.total_q, hp, p.proxy_dim), p.dtype),
            "dk_proxy": ((p.total_k, hpk, p.proxy_dim), grads),
            "kl": ((1,), real),
        }
        self.outputs = {}

    def buffer(self, name, size):
        if name not in self.buffers or len(self.buffers[name].bytes) != size:
            self.buffers[name] = Buffer(size, self.p.device)
        return self.buffers[name]

    def output(self, name):
        shape, dtype = self.shapes[name]
        count = 1
        for n in shape:
            count *= n
        buffer = self.buffer(name, count * dtype.itemsize)
        buffer.poison()
        self.outputs[name] = buffer.view(shape, dtype)
        return self.outputs[name]

    def tensors(self, outputs):
        t = Tensors(struct_size=ctypes.sizeof(Tensors))
        values = {**self.outputs, **self.inputs}
        for name in (*VIEWS, *RESULTS):
            if name not in values or (name in self.shapes and name in outputs and outputs[name] is None):
                continue
            x = values[name]
            if name == "block_indices":
                view = TensorView(x.data_ptr(), x.stride(1), x.stride(0))
                assert x.stride(2) == 1
            elif name == "lse":
                view = TensorView(x.data_ptr(), x.stride(1), x.stride(0))
            else:
                view = TensorView(x.data_ptr(), x.stride(0), x.stride(1))
                assert x.stride(2) == 1 or x.shape[2] == 1
            setattr(t, name, view)
        if "kl" in outputs:
            t.kl = self.outputs["kl"].data_ptr()
        if "grad_kl" in self.inputs:
            t.grad_kl = self.inputs["grad_kl"].data_ptr()
        if "schedule" in self.buffers:
            t.schedule = self.buffers["schedule"].bytes.data_ptr()
            t.schedule_bytes = len(self.buffers["schedule"].bytes)
        return t

    def prepare(self, operation, outputs):
        """Poisoned outputs, workspace and schedule; what an enqueued call (a captured one, say) needs."""
        c = self.p.config()
        size = ctypes.c_size_t()
        for name in outputs:
            self.output(name)
        if operation == SCHEDULE:
            check(lib.fmsa_schedule_bytes(ctypes.byref(c), ctypes.byref(size)))
            self.buffer("schedule", size.value).poison()
        check(lib.fmsa_workspace_bytes(ctypes.byref(c), operation, ctypes.byref(size)))
        workspace = self.buffer(f"workspace of {operation}", size.value)
        workspace.poison()
        return c, self.tensors(dict.fromkeys(outputs, True)), workspace

    def enqueue(self, operation, prepared):
        c, t, workspace = prepared
        if self.p.device == "cuda":
            c.stream = torch.cuda.current_stream().cuda_stream
        data = workspace.bytes.data_ptr() if len(workspace.bytes) else None
        check(RUN[operation](ctypes.byref(c), ctypes.byref(t), data, len(workspace.bytes)))

    def run(self, operation, outputs):
        self.enqueue(operation, self.prepare(operation, outputs))
        if self.p.device == "cuda":
            torch.cuda.synchronize()
        for name, buffer in self.buffers.items():
            assert buffer.intact(), f"memory around {name} was written by operation {operation}"

    def select(self):
        self.run(SELECT, ["block_indices"])
        return self.outputs["block_indices"]

    def schedule(self):
        self.run(SCHEDULE, [])

    def forward(self):
        self.run(FORWARD, ["out", "lse"])

    def proxy_loss(self, outputs=("kl", "dq_proxy", "dk_proxy")):
        self.run(PROXY_LOSS, outputs)

    def backward(self, outputs=("dq", "dk", "dv")):
        self.run(BACKWARD, outputs)

    def backward_with_proxy(self, outputs=("dq", "dk", "dv", "dq_proxy", "dk_proxy", "kl")):
        self.run(BACKWARD_WITH_PROXY, outputs)

    def step(self, proxy=True):
        """Selection (unless the inputs hold one), schedule, forward, backward."""
        if not self.p.dense:
            if "block_indices" not in self.inputs:
                self.select()
            self.schedule()
        self.forward()
        if proxy:
            self.backward_with_proxy()
        else:
            self.backward()
        return self.outputs


def make_inputs(p, seed=0, sharpness=1.0):
    """Random inputs whose scaled scores have the given deviation. Rows in no fragment are NaN: they are never read."""
    g = torch.Generator(device=p.device).manual_seed(seed)
    hq, hkv, hp, hpk = p.heads

    def normal(rows, heads, dim, deviation=1.0):
        return (torch.randn(rows, heads, dim, generator=g, device=p.device) * deviation).to(p.dtype)

    spread = sharpness**0.5
    x = {
        "q": normal(p.total_q, hq, p.dim, spread),
        "k": normal(p.total_k, hkv, p.dim, spread),
        "v": normal(p.total_k, hkv, p.dim),
        "q_proxy": normal(p.total_q, hp, p.proxy_dim, spread),
        "k_proxy": normal(p.total_k, hpk, p.proxy_dim, spread),
        "dout": normal(p.total_q, hq, p.dim),
        "grad_kl": torch.tensor([0.7], device=p.device, dtype=torch.float32),
    }
    q_used = torch.zeros(p.total_q, dtype=torch.bool)
    k_used = torch.zeros(p.total_k, dtype=torch.bool)
    for q0, q1, k0, k1 in p.fragments:
        q_used[q0:q1] = True
        k_used[k0:k1] = True
    for name in ("q", "q_proxy", "dout"):
        x[name][~q_used.to(p.device)] = float("nan")
    for name in ("k", "v", "k_proxy"):
        x[name][~k_used.to(p.device)] = float("nan")
    return x

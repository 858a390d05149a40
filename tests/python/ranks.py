"""Processes with a group for every number of ranks, kept for all tests of a file: four on the CPU with gloo, or one for
each card, up to four, with NCCL."""

from __future__ import annotations

import io
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

# Multicast over NVLink is left off, here and in the workers. NCCL reads this when it is loaded.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Failed(Exception):
    """A rank raised: the sentence of its exception, with its type."""


class Ranks:
    """Worker processes, each the rank of its number. `most` of them: tests ask for no more ranks."""

    def __init__(self, device: str = "cpu", preload: Sequence[str] = ()) -> None:
        self.device = device
        self.most = min(torch.cuda.device_count(), 4) if device == "cuda" else 4
        # A process that is forked from one that has asked for cards cannot use them.
        context: Any = mp.get_context("spawn" if device == "cuda" else "forkserver")
        if device == "cpu":
            context.set_forkserver_preload(["torch", "torch.distributed", "flashmsa.context_parallel", *preload])
        self.folder = tempfile.TemporaryDirectory(prefix="flashmsa_ranks_")
        self.pipes, self.processes = [], []
        for rank in range(self.most):
            mine, theirs = context.Pipe()
            arguments = (rank, self.most, device, f"{self.folder.name}/store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 40) -> list[Any]:
        """function(group, *args) on each of the first ranks; what each returned, on the CPU, or a Failed in its
        place."""
        for pipe in self.pipes[:ranks]:
            pipe.send((ranks, function, args))
        answers = []
        for rank, pipe in enumerate(self.pipes[:ranks]):
            if not pipe.poll(timeout):
                self.close()
                raise TimeoutError(f"rank {rank} of {ranks} did not answer within {timeout} s")
            try:
                answers.append(torch.load(io.BytesIO(pipe.recv_bytes()), map_location="cpu", weights_only=False))
            except EOFError:
                answers.append(Failed("EOFError: the process has ended"))
        return answers

    def all(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `run`, where no rank may fail."""
        answers = self.run(ranks, function, *args)
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(1)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


def _serve(rank: int, world: int, device: str, store: str, pipe: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world + 1)}
    while True:
        try:
            ranks, function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = function(groups[ranks], *args)
        except Exception as error:
            answer = Failed(f"{type(error).__name__}: {error}")
            if os.environ.get("FLASHMSA_TEST_TRACEBACKS"):
                traceback.print_exc()
        buffer = io.BytesIO()
        torch.save(answer, buffer)
        pipe.send_bytes(buffer.getvalue())
    dist.destroy_process_group()

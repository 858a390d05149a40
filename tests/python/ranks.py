"""Processes with a process group for every number of ranks, kept for all tests of a run."""

from __future__ import annotations

import io
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

# Multicast over NVLink is left off, here and in the workers. NCCL reads this when it is loaded.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.distributed_c10d import _resolve_process_group

from flashmsa import _cp_exchange

MOST = 4


class Failed(Exception):
    """A rank raised: the sentence of its exception, with its type."""


class Ranks:
    """Worker processes, each the rank of its number; tests ask for no more than `most`. They are on the "cpu", share
    "one_card", or have a card each ("cards"). The first two talk by gloo; the third by NCCL, which wants a card for
    every rank."""

    def __init__(self, where: str) -> None:
        self.device = "cpu" if where == "cpu" else "cuda"
        self.most = min(torch.cuda.device_count(), MOST) if where == "cards" else MOST
        self.where = where
        self.pipes: list[Any] = []
        self.processes: list[Any] = []

    def start(self) -> None:
        """`run` does it where they do not run."""
        # What is forked from a process that has asked for cards cannot use them.
        context: Any = mp.get_context("forkserver" if self.device == "cpu" else "spawn")
        if self.device == "cpu":
            context.set_forkserver_preload(["torch", "torch.distributed", "flashmsa.context_parallel"])
        self.folder = tempfile.TemporaryDirectory(prefix="flashmsa_ranks_")
        for rank in range(self.most):
            mine, theirs = context.Pipe()
            arguments = (rank, self.most, self.where, f"{self.folder.name}/store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """function(group, *args) on each of the first ranks; what each returned, on the CPU, or a Failed in its
        place."""
        if not self.processes:
            self.start()
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
        """Ends the processes; the next `run` starts others."""
        if not self.processes:
            return
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(1)
            if process.is_alive():
                process.kill()
        self.pipes, self.processes = [], []
        self.folder.cleanup()


class ThroughHost:
    """The functional collectives for ranks that share a card, which neither NCCL nor gloo gives them. They run on a
    stream of their own, as NCCL's do, and late: who does not wait for a result reads NaN."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pending: dict[int, Any] = {}

    def _start(self, x: torch.Tensor, rows: int, carry: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        result = x.new_full((rows, *x.shape[1:]), float("nan") if x.is_floating_point() else -1)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            carried = carry(x.cpu()).pin_memory()
            torch.cuda._sleep(1 << 22)
            result.copy_(carried, non_blocking=True)
            self.pending[result.data_ptr()] = self.stream.record_event()
        result.record_stream(self.stream)
        return result

    def all_gather_into_tensor(self, x: torch.Tensor, world: int, group: Any) -> torch.Tensor:
        def carry(host: torch.Tensor) -> torch.Tensor:
            every = [torch.empty_like(host) for _ in range(world)]
            dist.all_gather(every, host, group=_resolve_process_group(group))
            return torch.cat(every)

        return self._start(x, world * x.shape[0], carry)

    def reduce_scatter_tensor(self, x: torch.Tensor, _: str, world: int, group: Any) -> torch.Tensor:
        def carry(host: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(host, group=_resolve_process_group(group))
            return host.chunk(world)[dist.get_rank(_resolve_process_group(group))]

        return self._start(x, x.shape[0] // world, carry)

    def all_reduce(self, x: torch.Tensor, _: str, group: Any) -> torch.Tensor:
        def carry(host: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(host, group=_resolve_process_group(group))
            return host

        return self._start(x[None], 1, carry)[0]

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        event = self.pending.pop(x.data_ptr(), None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        return x


def _serve(rank: int, world: int, where: str, store: str, pipe: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if where == "cards":
        torch.cuda.set_device(rank)
    if where == "one_card":
        _cp_exchange._collectives = ThroughHost()
    backend = "nccl" if where == "cards" else "gloo"
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

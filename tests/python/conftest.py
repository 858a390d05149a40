"""Inputs that the tests share, and the choice of devices."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from ranks import Ranks

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no card"))]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param("one_card", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")),
        pytest.param("cards", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 cards")),
    ],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Processes that tests of several ranks share."""
    from ranks import Ranks

    workers = Ranks(request.param)
    yield workers
    workers.close()


@dataclasses.dataclass
class Inputs:
    """Leaf tensors of one call, packed."""

    q_proxy: torch.Tensor
    k_proxy: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        return [self.q_proxy, self.k_proxy, self.q, self.k, self.v]

    def clone(self, dtype: torch.dtype | None = None) -> Inputs:
        """The same values in fresh leaves."""
        return Inputs(*[x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in self.leaves()], self.cu)


def make_inputs(
    lengths: list[int],
    heads: tuple[int, int, int, int] = (4, 2, 2, 1),
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Packed documents of these lengths; heads are Hq, Hkv, Hp, Hpk."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    hq, hkv, hp, hpk = heads

    def leaf(count: int) -> torch.Tensor:
        return torch.randn(total, count, dim, generator=g, dtype=torch.float64).to(device, dtype).requires_grad_()

    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return Inputs(leaf(hp), leaf(hpk), leaf(hq), leaf(hkv), leaf(hkv), cu)

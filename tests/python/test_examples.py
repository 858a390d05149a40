"""The Python examples run, and show what they are there to show."""

from __future__ import annotations

import pathlib
import re
import runpy
from collections.abc import Iterator

import pytest
import torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def output(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def column(text: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"{name} ([-+.\de]+)", text)]


def test_training_step(capsys: pytest.CaptureFixture[str]) -> None:
    text = output("training_step.py", capsys)
    assert "out (1, 1024, 2048)" in text
    for name in ("KL", r"\|dq\|", r"\|dq_proxy\|"):
        assert column(text, name)[0] > 0


def test_packed_documents(capsys: pytest.CaptureFixture[str]) -> None:
    text = output("packed_documents.py", capsys)
    loss, kl = column(text, "loss"), column(text, "KL")
    assert len(loss) == 12
    assert "sparse" in text
    assert loss[-1] < loss[0]
    assert 0 < kl[-1] < kl[0]


def test_finetune_minimax_m3(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    text = output("finetune_minimax_m3.py", capsys)
    loss, kl = column(text, "loss"), column(text, "KL")
    assert len(loss) == 10
    assert loss[-1] < loss[0]
    assert 0 < kl[-1] < kl[0]

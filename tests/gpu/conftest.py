import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def pytest_sessionstart(session):
    if not torch.cuda.is_available():
        pytest.exit("the GPU tests need a CUDA device", returncode=2)


@pytest.fixture(autouse=True)
def memory():
    yield
    torch.cuda.empty_cache()

#!/usr/bin/env bash
# Installs the Python package (CPU library alone) into a virtual environment in build/python, as a user would, and runs
# its tests there. Usage: scripts/test_python.sh [pytest options]
# TORCH is what pip installs as PyTorch. Where pip finds only builds with CUDA, point PIP_EXTRA_INDEX_URL to PyTorch's
# index of CPU builds first: they are a tenth of the size.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/python/venv
python=$venv/bin/python
[ -x "$python" ] || python3 -m venv "$venv"
"$python" -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy 'pytest>=8' 'transformers>=5.17,<6'
"$python" -m pip install --quiet --force-reinstall --no-deps . \
    --config-settings=build-dir=build/python/wheel --config-settings=cmake.define.FLASHMSA_CUDA=OFF
# Waiting threads sleep: PyTorch and the library each have threads of their own.
unset PYTHONPATH FLASHMSA_LIBRARY
OMP_WAIT_POLICY=passive "$python" -m pytest -q --durations=5 "$@"

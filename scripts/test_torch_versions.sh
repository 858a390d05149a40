#!/usr/bin/env bash
# One wheel under several versions of PyTorch: builds it once, installs the same file into a virtual environment of each
# version, and runs the tests there. Usage: scripts/test_torch_versions.sh VERSION... [-- pytest options]
#   for example: scripts/test_torch_versions.sh 2.4.1 2.13.0
# WHEEL is a wheel that exists already. An environment build/torch/VERSION that exists is used as it is, so that a
# version which pip cannot install by itself can be put there by hand. Run by hand: each version is a large download.
set -euo pipefail
cd "$(dirname "$0")/.."
versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do versions+=("$1"); shift; done
[ $# -eq 0 ] || shift
[ ${#versions[@]} -gt 0 ] || { sed -n 2,7p "$0"; exit 2; }

folder=build/torch
mkdir -p "$folder"
wheel=${WHEEL:-}
if [ -z "$wheel" ]; then
    python3 -m pip wheel --quiet --no-deps --wheel-dir "$folder" . \
        --config-settings=build-dir=build/python/wheel --config-settings=cmake.define.FLASHMSA_CUDA=OFF
    wheel=$(ls -t "$folder"/flashmsa-*.whl | head -1)
fi
echo "Wheel: $(basename "$wheel") $(sha256sum "$wheel" | cut -c1-16)"
unset PYTHONPATH FLASHMSA_LIBRARY
failed=0
for version in "${versions[@]}"; do
    python=$folder/$version/bin/python
    if [ ! -x "$python" ]; then
        python3 -m venv "$folder/$version"
        "$python" -m pip install --quiet "torch==$version" 'numpy<2' 'pytest>=8'
    fi
    "$python" -m pip install --quiet --force-reinstall --no-deps "$wheel"
    "$python" -c 'import flashmsa, torch; print("PyTorch", torch.__version__, "flashmsa", flashmsa.__version__)'
    OMP_WAIT_POLICY=passive "$python" -m pytest -q --tb=short "$@" || failed=1
done
exit $failed

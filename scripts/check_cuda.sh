#!/usr/bin/env bash
# Compiles every CUDA kernel for every target, warnings as errors, and fails where a kernel spills registers or wgmma is
# serialised, unless scripts/allowed_spills.txt lists the kernel with its reason. Needs no GPU. Where there is no nvcc,
# it is installed from PyPI into build/nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."

nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [ -z "$nvcc" ]; then
    [ -x build/nvcc/bin/python ] || python3 -m venv build/nvcc
    build/nvcc/bin/pip install --quiet 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-runtime==13.0.*' \
        'nvidia-cuda-cccl==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*'
    toolkit=$(echo "$PWD"/build/nvcc/lib/python3*/site-packages/nvidia/cu13)
    ln -sfn lib "$toolkit/lib64" # where nvcc and CMake look, and the name they look for
    ln -sfn libcudart.so.13 "$toolkit/lib/libcudart.so"
    nvcc=$toolkit/bin/nvcc
fi
log=build/check_cuda.log
cmake -S . -B build/check_cuda -G "Unix Makefiles" -DFLASHMSA_CUDA=ON -DCMAKE_CUDA_COMPILER="$nvcc" \
    -DCMAKE_CUDA_FLAGS="-Xptxas=-v" -DFLASHMSA_BUILD_TOOLS=OFF >/dev/null
start=$(date +%s)
cmake --build build/check_cuda --clean-first -j "$(nproc)" -- --output-sync=target >"$log" 2>&1 || { tail -n 60 "$log"; exit 1; }
echo "Compiled in $(($(date +%s) - start)) s."
python3 scripts/read_ptxas.py "$log" scripts/allowed_spills.txt

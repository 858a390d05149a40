#!/usr/bin/env bash
# Fuzzes geometry and block_indices with libFuzzer for so many seconds: scripts/fuzz.sh SECONDS. Inputs that break
# something stay in build/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
cmake -S . -B build/fuzz -DCMAKE_C_COMPILER=clang -DFLASHMSA_CUDA=OFF -DFLASHMSA_BUILD_TOOLS=ON -DFLASHMSA_SANITIZE=ON \
    -DFLASHMSA_FUZZ=ON >/dev/null
cmake --build build/fuzz -j "$(nproc)" --target fuzz_geometry
mkdir -p build/fuzz/corpus
build/fuzz/tests/fuzz_geometry -max_total_time="$seconds" -timeout=20 -artifact_prefix=build/fuzz/ build/fuzz/corpus \
    tests/fuzz/corpus 2>&1 | tail -n 5

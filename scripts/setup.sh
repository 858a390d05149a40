#!/usr/bin/env bash
# Makes sure that what a make target needs is on this machine: scripts/setup.sh build|test|ci
#   build  a C compiler with OpenMP, CMake, and OpenBLAS (used at run time by `train` and `bench` when it is there)
#   test   the same, cmocka, and a Python that can make virtual environments
#   ci     the same, and clang with its runtimes
# On a Debian-like system, root (or sudo without a password) installs what is missing. Elsewhere this says what to
# install and fails, unless only optional things are missing.
set -euo pipefail
level=${1:-build}

have_library() { ldconfig -p 2>/dev/null | grep -q "$1"; }
clang_compiles() { echo '#include <omp.h>
int main(void) { return 0; }' | clang -fopenmp -fsanitize=address,fuzzer-no-link -x c - -o /dev/null 2>/dev/null; }
have_venv() { python3 -c 'import ensurepip, venv' 2>/dev/null; }

required=()
optional=()
command -v "${CC:-cc}" >/dev/null || required+=(gcc libc6-dev)
command -v make >/dev/null || required+=(make)
command -v cmake >/dev/null || required+=(cmake)
have_library libopenblas || optional+=(libopenblas0-pthread)
if [ "$level" != build ]; then
    [ -e /usr/include/cmocka.h ] || [ -e /usr/local/include/cmocka.h ] || required+=(libcmocka-dev)
    have_venv || required+=(python3 python3-venv)
fi
if [ "$level" = ci ]; then
    clang_compiles || required+=(clang libomp-dev libclang-rt-dev)
fi
[ ${#required[@]} -eq 0 ] && [ ${#optional[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if sudo -n true 2>/dev/null; then as_root=(sudo -n); else as_root=(false); fi
fi
if command -v apt-get >/dev/null && [ "${as_root[*]}" != false ]; then
    echo "Installing: ${required[*]} ${optional[*]}"
    export DEBIAN_FRONTEND=noninteractive
    "${as_root[@]}" apt-get update -qq
    if [ ${#required[@]} -gt 0 ]; then
        "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${required[@]}" >/dev/null
    fi
    if [ ${#optional[@]} -gt 0 ]; then
        "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${optional[@]}" >/dev/null ||
            echo "Going on without ${optional[*]}."
    fi
    exit 0
fi
if [ ${#required[@]} -gt 0 ]; then
    echo "This needs (Debian's names): ${required[*]}. Install them, or run this as root or with sudo." >&2
    exit 1
fi

# Front door of the build. CMake does the work; each target below installs what is missing (scripts/setup.sh).
BUILD ?= build
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PREFIX ?= /usr/local
FORMATTED = $(shell git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cu' '*.cuh')

.PHONY: all demo test test-release test-sanitize test-python bench install format format-check clean

# The library with every backend this machine can build, and the flashmsa command.
all:
	@scripts/setup.sh build
	cmake -S . -B $(BUILD)/release
	cmake --build $(BUILD)/release -j $(JOBS)

# The CPU library alone: never waits for a CUDA build.
$(BUILD)/cpu/tools/flashmsa: FORCE
	@scripts/setup.sh build
	@cmake -S . -B $(BUILD)/cpu -DFLASHMSA_CUDA=OFF >/dev/null
	@cmake --build $(BUILD)/cpu -j $(JOBS)
FORCE:

# Trains a small byte-level transformer on this repository's own text, dense and with MSA, and compares the two. Waiting
# threads sleep, so that a busy machine is not made busier.
demo: $(BUILD)/cpu/tools/flashmsa
	OMP_WAIT_POLICY=passive $(BUILD)/cpu/tools/flashmsa train --compare --out $(BUILD)/demo

# Everything that needs no GPU: the C tests as they ship, again under ASan and UBSan, and the Python package's.
test: test-release test-sanitize test-python

test-release:
	@scripts/setup.sh test
	cmake -S . -B $(BUILD)/test -DFLASHMSA_CUDA=OFF -DFLASHMSA_BUILD_TESTS=ON
	cmake --build $(BUILD)/test -j $(JOBS)
	ctest --test-dir $(BUILD)/test --output-on-failure

test-sanitize:
	@scripts/setup.sh test
	cmake -S . -B $(BUILD)/sanitize -DFLASHMSA_CUDA=OFF -DFLASHMSA_BUILD_TESTS=ON -DFLASHMSA_SANITIZE=ON
	cmake --build $(BUILD)/sanitize -j $(JOBS)
	ctest --test-dir $(BUILD)/sanitize --output-on-failure

test-python:
	@scripts/setup.sh test
	scripts/test_python.sh

# The speed of every operation beside a large sgemm, at two lengths.
bench: $(BUILD)/cpu/tools/flashmsa
	$(BUILD)/cpu/tools/flashmsa bench --tokens 16384,65536

install: all
	cmake --install $(BUILD)/release --prefix $(PREFIX)
	@ldconfig 2>/dev/null || echo "Now run ldconfig as root, or set LD_LIBRARY_PATH, so that programs find the library."

format:
	clang-format -i $(FORMATTED)

format-check:
	clang-format --dry-run --Werror $(FORMATTED)

clean:
	rm -rf $(BUILD)

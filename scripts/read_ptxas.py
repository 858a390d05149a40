#!/usr/bin/env python3
"""Reads a build log made with `-Xptxas -v`: fails on spills that are not allowed, and on serialised wgmma.

usage: read_ptxas.py LOG ALLOWED

ALLOWED holds lines "architecture kernel-substring bytes reason ...": a kernel whose mangled name contains the substring
may spill up to so many bytes (stores plus loads) on that architecture, or on any if it is *. Lines that begin with #
are comments.
"""

import re
import sys
from pathlib import Path

COMPILING = re.compile(r"Compiling entry function '(?P<kernel>\S+)' for '(?P<arch>sm_\w+)'")
SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
WARNING = re.compile(r"\bwarning\b|\bC75\d\d\b", re.IGNORECASE)


def read_allowed(path: Path) -> list[tuple[str, str, int]]:
    rows = [line.split(maxsplit=3) for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return [(arch, kernel, int(limit)) for arch, kernel, limit, _reason in rows]


def main() -> int:
    log, allowed = Path(sys.argv[1]).read_text(errors="replace"), read_allowed(Path(sys.argv[2]))
    faults: list[str] = []
    kernels = 0
    arch = kernel = ""
    for line in log.splitlines():
        if match := COMPILING.search(line):
            arch, kernel = match["arch"], match["kernel"]
            kernels += 1
        elif match := SPILLS.search(line):
            spilled = int(match["stores"]) + int(match["loads"])
            limit = max((most for a, name, most in allowed if a in (arch, "*") and name in kernel), default=0)
            if spilled > limit:
                faults.append(f"{arch} {kernel} spills {spilled} bytes; {limit} are allowed")
        elif WARNING.search(line) and "-Werror" not in line:
            faults.append(line.strip())
    for fault in faults:
        print(fault)
    print(f"{kernels} kernels compiled, {len(faults)} faults")
    return 1 if faults or kernels == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

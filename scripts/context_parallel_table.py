"""Prints what context parallelism costs a rank, for 1 to 64 ranks: the tables of docs/context_parallel.md.

    python scripts/context_parallel_table.py [--tokens 1048576] [--heads 64/4/4/1] [--dim 128]
    python scripts/context_parallel_table.py --packs tests/packs_192k.json

One document, bf16, one layer. Everything follows from the plan and from shapes: bytes that a rank receives in a forward
pass, and that it sends for gradients in fp32 in a backward pass; keys it keeps between the two; its tensors of queries
and outputs with their gradients; the memory that the exchange needs for a while; and the modelled balance.
"""

from __future__ import annotations

import argparse
import json
import pathlib

from flashmsa.context_parallel import make_plan

MIB, GIB = 1 << 20, 1 << 30


def row_bytes(heads: int, kv_heads: int, proxy_heads: int, proxy_kv_heads: int, dim: int) -> tuple[int, int]:
    """Bytes of bf16 that a token has on its rank (q, out, dout, dq, q_proxy, dq_proxy; lse), and in its keys."""
    queries = 2 * dim * (4 * heads + 2 * proxy_heads) + 4 * heads
    return queries, 2 * dim * (2 * kv_heads + proxy_kv_heads)


def pack_row(name: str, lengths: list[int]) -> str:
    """Modelled balance, balance of rows and tokens whose keys travel, on 2 to 16 ranks."""
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    cells = [name, f"{len(lengths)}", f"{max(lengths):,}"]
    for ranks in (2, 4, 8, 16):
        plan = make_plan(offsets, ranks)
        rows, travelling = max(plan.rows) * ranks / offsets[-1], sum(plan.shared_rows) / offsets[-1]
        cells.append(f"{plan.imbalance:.4f} / {rows:.2f} / {travelling:.0%}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--heads", default="64/4/4/1", help="main, key/value, proxy and proxy key heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--packs", help="a file of document lengths: print how these are balanced instead")
    arguments = parser.parse_args()
    if arguments.packs:
        for name, lengths in json.loads(pathlib.Path(arguments.packs).read_text())["packs"].items():
            print(pack_row(name, lengths))
        return
    heads = [int(n) for n in arguments.heads.split("/")]
    query_bytes, key_bytes = row_bytes(*heads, arguments.dim)
    print(f"{arguments.tokens:,} tokens, {arguments.heads} heads of {arguments.dim}: {key_bytes} key bytes a token\n")
    print("| ranks | rows | received MiB | gradients MiB | keys kept MiB | queries GiB | passing MiB | work |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        plan = make_plan([0, arguments.tokens], ranks)
        padded, rows = max(plan.shared_rows), max(plan.rows)
        received = (ranks - 1) * padded * key_bytes
        # In the forward pass all gathered rows lie there twice until they are in order. In the backward pass the fp32
        # gradients of all keys do; they are the larger.
        passing = 2 * arguments.tokens * 2 * key_bytes if ranks > 1 else 0
        cells = [
            f"{ranks}",
            f"{rows:,}",
            f"{received / MIB:,.0f}",
            f"{2 * received / MIB:,.0f}",
            f"{arguments.tokens * key_bytes / MIB:,.0f}",
            f"{rows * query_bytes / GIB:.2f}",
            f"{passing / MIB:,.0f}",
            f"{plan.imbalance:.4f}",
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

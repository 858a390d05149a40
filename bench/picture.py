"""Draws step time against length from the report of bench/peers.py: the picture in the README.

python bench/picture.py results/peers_h200.json docs/step_time.svg"""

from __future__ import annotations

import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

NAMES = {
    "flashmsa": ("flashmsa: MSA with KL", "#d1495b", "o"),
    "flashmsa warm-up": ("flashmsa: dense warm-up with KL", "#edae49", "s"),
    "cudnn": ("cuDNN: dense", "#30638e", "^"),
    "fa4": ("FlashAttention-4: dense", "#00798c", "v"),
    "flash-msa": ("flash-msa 0.1.1: MSA", "#6c757d", "D"),
}


def main() -> None:
    source, target = sys.argv[1:3]
    report = json.loads(pathlib.Path(source).read_text())
    plt.rcParams.update({"svg.hashsalt": "flashmsa", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for peer, (label, colour, marker) in NAMES.items():
        points = sorted((row["tokens"], row["step_ms"]) for row in report["rows"] if row["peer"] == peer)
        if points:
            axes.plot(*zip(*points, strict=True), label=label, color=colour, marker=marker)
    tokens = sorted({row["tokens"] for row in report["rows"]})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{n // 1024}K" for n in tokens])
    axes.set_xlabel("tokens")
    axes.set_ylabel("forward + backward of one layer, ms")
    heads = report["rows"][0]["heads"]
    axes.set_title(f"{report['card']}, {heads} heads, D 128, k {report['top_k']}, {report['dtype']}", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()

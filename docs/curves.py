"""Draws valid perplexity against wall time from journals: `python docs/curves.py OUT.png NAME=JOURNAL.jsonl …`."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def checks(path: str) -> tuple[list[float], list[float]]:
    """Return (minutes, valid perplexity) of every check in a journal."""
    events = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    found = [(event["seconds"] / 60, event["valid"]) for event in events if event["event"] == "check"]
    return [minutes for minutes, _ in found], [valid for _, valid in found]


def main(out: str, *curves: str) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for curve in curves:
        name, _, path = curve.partition("=")
        axes.plot(*checks(path), marker=".", label=name)
    axes.set(
        xlabel="minutes of wall time on one core",
        ylabel="valid perplexity",
        yscale="log",
        title="Penn Treebank, sentence-level",
    )
    ticks = [140, 150, 160, 180, 200, 250, 300, 400]
    axes.set_yticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Writes the records in results/ into README.md and paper/log/, between their markers, and docs/settings.md.

`python docs/render_results.py`. The paper's tables are rendered by `python -m paper all --render --write-docs`; this
page maker has the runs and measurements that stand beside them, so that no number is typed by hand.
"""

import json
import re
from pathlib import Path
from typing import Any

from vlhmm.cli.main import available

ROOT = Path(__file__).resolve().parent.parent
RUNS = ("em-ptb-13", "em-ptb-14", "gradient-ptb-13", "softmax-ptb-13", "paper-ptb-10")
HOW = {
    "em-ptb-13": "block-factored, generalized EM",
    "em-ptb-14": "block-factored, generalized EM",
    "gradient-ptb-13": "block-factored, gradient",
    "softmax-ptb-13": "the paper's softmax, gradient",
    "paper-ptb-10": "the paper's softmax, gradient",
}
PAPER = {1024: "213.25", 8192: "150.22", 16384: "135.79"}  # valid, carried state; Chiu & Rush 2020, figure 4


def record(name: str, folder: str = "results/trials") -> dict[str, Any] | None:
    path = ROOT / folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def runs_table() -> str:
    """Return the table of runs on Penn Treebank with their commands."""
    lines = [
        "| states | how | valid | test | valid / test, carried | paper, valid | minutes, cores |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    commands = []
    for run in filter(None, map(record, RUNS)):
        lines.append(
            f"| {run['num_states']:,} | {HOW[run['name']]} | {run['valid_reset']:.1f} | {run['test_reset']:.1f} | "
            f"{run['valid_carry']:.1f} / {run['test_carry']:.1f} | {PAPER[run['num_states']]} | "
            f"{run['wall_seconds'] / 60:.1f}, {run['threads']} |"
        )
        commands.append(run["command"])
    return "\n".join([*lines, "", "```", *commands, "```"])


def bench_table() -> str:
    """Return what `python -m benchmarks` measured."""
    bench = record("bench", "benchmarks/results")
    if bench is None:
        return "Not measured yet."

    def shown(key: str, form: str) -> str:
        return "not measured" if bench.get(key) is None else form.format(bench[key])

    tokens, within = shown("states_2_17_tokens_a_step", "{:,}"), shown("states_2_17_within", "{}")
    rows = [
        ("block-factored training (linear maps) at 2^15 states against torch's 2×256 LSTM, 8,192 tokens per step", shown("block_factored_vs_lstm", "{:.2f}×")),
        ("against the LSTM of `vlhmm baseline`", shown("block_factored_vs_package_lstm", "{:.2f}×")),
        ("with residual networks, against torch's", shown("block_factored_residual_vs_lstm", "{:.2f}×")),
        ("linear maps, low-rank within blocks, against torch's", shown("low_rank_vs_lstm", "{:.1f}×")),
        ("linear maps against the naive program" + (", extrapolated" if bench.get("naive_extrapolated") else ""), shown("block_factored_vs_naive", "{:,.0f}×")),
        ("against a naive program that knows blocks", shown("block_factored_vs_naive_blocked", "{:,.0f}×")),
        ("E-step at 2^15 states, half of them kept", shown("estep_tokens_per_s", "{:,.0f} tokens/s")),
        ("the paper's softmax, streamed, 2^15 states: share of the machine's matrix-product rate", shown("softmax_share_of_peak", "{:.0%}")),
        ("its peak memory", shown("softmax_peak_gb", "{:.1f} GB")),
        (f"training tokens/s at 2^17 states against 2^15, {within} within blocks, {tokens} tokens per step", shown("states_2_17_vs_2_15", "{:.2f}×")),
        ("training tokens/s at 2^17 states", shown("states_2_17_tokens_per_s", "{:,.0f}")),
        ("its peak memory", shown("states_2_17_peak_gb", "{:.1f} GB")),
        ("2^17 against 2^15 with a softmax within blocks, 32,768 tokens per step", shown("states_2_17_vs_2_15_softmax_within", "{:.2f}×")),
        ("the same at 8,192 tokens per step", shown("states_2_17_vs_2_15_small_steps", "{:.2f}×")),
        ("scoring a long text at 2^15 states", shown("scoring_tokens_per_s", "{:,.0f} tokens/s")),
        ("its largest difference from the log-space reference, nats per token", shown("scoring_max_abs_diff", "{:.1e}")),
    ]  # fmt: skip
    asked = record("bench-queries", "benchmarks/results")
    if asked is not None:  # by `python -m benchmarks queries`
        rows += [
            ("queries at 2^15 states: next word after a context", f"{asked['next_ms']:.0f} ms"),
            ("sampling", f"{asked['sample_tokens_per_s']:,.0f} tokens/s"),
            ("filling a gap of one word in a sentence of twenty", f"{asked['infill_1_s']:.2f} s"),
            ("filling a gap of five words", f"{asked['infill_5_s']:.1f} s"),
        ]
    return "\n".join(["| what | measured |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows)])


def short_bench_table() -> str:
    """Four numbers of it, for the README."""
    bench, asked = record("bench", "benchmarks/results") or {}, record("bench-queries", "benchmarks/results") or {}
    rows = [
        ("training at 2^15 states against torch's 2×256 LSTM, 8,192 tokens per step", bench.get("block_factored_vs_lstm"), "{:.1f}×"),
        ("training at 2^15 states against a naive dense program (extrapolated)", bench.get("block_factored_vs_naive"), "{:,.0f}×"),
        ("exact scoring at 2^15 states", bench.get("scoring_tokens_per_s"), "{:,.0f} tokens/s"),
        ("filling a one-word gap in a sentence of twenty words, 2^15 states", asked.get("infill_1_s"), "{:.2f} s"),
    ]  # fmt: skip
    lines = [f"| {what} | {form.format(value)} |" for what, value, form in rows if value is not None]
    return "\n".join(["| what | measured |", "| --- | --- |", *lines])


def commands_table() -> str:
    """Return every verb with its sentence of `vlhmm --help`."""
    rows = [f"| `vlhmm {verb}` | {text} |" for verb, text in available().items()]
    return "\n".join(["| command | what it does |", "| --- | --- |", *rows])


def insert(path: Path, marker: str, content: str) -> None:
    """Puts `content` between <!-- marker --> and <!-- end -->."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- end -->)", re.DOTALL)
    path.write_text(pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text), encoding="utf-8")


def settings_page() -> str:
    """Return docs/settings.md: what `--set` takes, from the help texts in the source."""
    from vlhmm.baselines.training import BaselineConfig
    from vlhmm.config import by_group, settings_of
    from vlhmm.training.config import RunConfig

    parts = [
        "# Settings\n\nWhat `--set name=value` takes, with its default; presets (`vlhmm train --list-presets`) have other values. Numbers may be written 2^15 or 1e-3; "
        "`none` clears an optional one. Written by `python docs/render_results.py` from the source; `vlhmm train --list-settings` prints the same.\n"
    ]
    for title, kind in (("vlhmm train", RunConfig), ("vlhmm baseline ff, lstm", BaselineConfig)):
        parts.append(f"## {title}")
        for group, settings in by_group(settings_of(kind)).items():
            rows = [
                f"| `{each.name}` | {each.default} | {each.choices.replace('|', 'or')} | {each.meaning.replace('|Z|', 'Z')} |"
                for each in settings
            ]
            head = [f"### {group[0].upper()}{group[1:]}\n", "| name | default | takes | meaning |", "| --- | --- | --- | --- |"]
            parts.append("\n".join([*head, *rows]))
    return "\n".join([parts[0], "\n\n".join(parts[1:])]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "settings.md").write_text(settings_page(), encoding="utf-8")
    insert(ROOT / "README.md", "commands", commands_table())
    insert(ROOT / "README.md", "bench", short_bench_table())
    insert(ROOT / "docs" / "bench.md", "bench", bench_table())
    insert(ROOT / "paper" / "log" / "2026-11-16-em-and-gradient.md", "runs", runs_table())

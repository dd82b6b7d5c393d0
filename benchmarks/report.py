"""The benchmark's row as Markdown. Input: what `run_bench` returned. Output: text."""

from collections.abc import Sequence
from typing import Any

from benchmarks.growth import SERIES, series
from benchmarks.run import HEADLINES


def markdown(row: dict[str, Any]) -> str:
    """Return a heading that says what was measured on what, then tables: headlines, contestants, growth."""
    sized = {"full": "", "quick": " (quick: smaller sizes, rougher figures)"}.get(
        row["sizes"], f" ({row['sizes']} sizes)"
    )
    sections = [
        f"# python -m benchmarks{sized}",
        context(row),
        table(("figure", "value"), headline_rows(row)),
        contestants(row),
        growth(row),
        notes(row),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def context(row: dict[str, Any]) -> str:
    """Machine, corpus, commit, time."""
    machine = row["machine"]
    memory = f", {machine['memory_gb']:.0f} GB" if machine["memory_gb"] else ""
    load = f", load {machine['load_at_start']:.1f} at the start" if machine["load_at_start"] is not None else ""
    commit = f" at {row['commit']}" if row["commit"] else ""
    instead = f" (instead of {row['corpus_asked_for']}: {row['corpus_instead']})" if row["corpus_instead"] else ""
    return (
        f"{machine['processor']}, {machine['threads']} threads{memory}{load}; torch {machine['torch']}, "
        f"numba {machine['numba']}, vlhmm {machine['vlhmm']}{commit}. Corpus {row['corpus']}{instead}: "
        f"{row['train_tokens']:,} tokens, {row['vocabulary']:,} words. {row['seconds']:.0f} s in all."
    )


def headline_rows(row: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return (name, value) of the promised keys."""
    sizes = row["sizes_measured"]
    small = sizes["growth_pair"]
    pair = {
        "states_2_17_vs_2_15": f" ({small[1]} states by {small[0]}, {sizes['growth_low_rank_batch']:,} tokens per step, low-rank within blocks)",
        "states_2_17_peak_gb": f" ({small[1]} states)",
    }
    return [(f"`{name}`{pair.get(name, '')}", shown(row[name])) for name in HEADLINES]


def contestants(row: dict[str, Any]) -> str:
    """Who was measured: states, tokens/s, memory, and how far from its reference implementation."""
    figures = row["figures"]
    lines: list[tuple[str, ...]] = []

    def add(title: str, found: dict[str, Any] | None, speed: str = "tokens_per_s") -> None:
        if found and speed in found:
            states = found.get("num_states")
            check = ", ".join(
                f"{name} {value:.1e}" for name, value in found.get("check", {}).items() if isinstance(value, float)
            )
            lines.append((title, shown(states), shown(found[speed]), shown(found.get("peak_gb")), check or "–"))

    training, naive = figures.get("training", {}), figures.get("naive", {})
    add("block-factored, gradient", training.get("block_factored"))
    add("block-factored, gradient, residual networks", training.get("block_factored_residual"))
    add("block-factored, gradient, low-rank within blocks", training.get("low_rank"))
    add("block-factored, E-step", figures.get("em"), "estep_tokens_per_s")
    add("block-factored, whole EM iteration", figures.get("em"))
    add("the paper's softmax, streamed", figures.get("softmax"))
    add("LSTM 2 x h, plain torch, the same batches", training.get("lstm"))
    add("LSTM 2 x h, this package's, streams", training.get("package_lstm"))
    for variant, found in naive.items():
        if isinstance(found, dict):
            largest = found["sizes"][-1] | {
                "tokens_per_s": found["measured_tokens_per_s"],
                "check": found["check"],
            }
            add(f"naive, {variant}, the largest measured", largest)
            if found["extrapolated"]:
                add(f"naive, {variant}, extrapolated", {**found, "peak_gb": None, "check": {}})
    add("scoring, parameters cached", figures.get("scoring"))
    return table(("contestant", "states", "tokens/s", "peak GB", "difference from its reference"), lines) if lines else ""


def growth(row: dict[str, Any]) -> str:
    """Return a table a series."""
    points = row["figures"].get("growth", {}).get("points")
    if not points:
        return ""
    tables = []
    for name, entries in series(points).items():
        lines = [
            (
                shown(x),
                shown(p["num_blocks"]),
                shown(p["tokens_per_s"]),
                f"{p['seconds_per_step']:.3f}",
                shown(p["peak_gb"]),
            )
            for x, p in entries
        ]
        tables.append(table((SERIES[name], "blocks", "tokens/s", "s a step", "peak GB"), lines))
    return "\n\n".join(tables)


def notes(row: dict[str, Any]) -> str:
    """Return what a reader must know to read the tables."""
    sizes = row["sizes_measured"]
    lines = [
        f"h={sizes['hidden_size']}, λ={sizes['state_dropout']}, {sizes['batch_tokens']:,} tokens per step "
        "and linear maps unless said. Medians; the contestants of a ratio take turns.",
        "The naive program has no state dropout, and dense tables of transitions and masked emissions; "
        "`dense` multiplies messages over all states, `blocked` gathers block tiles.",
    ]
    naive = row["figures"].get("naive", {})
    lines += [f"naive, {name}: {found['ended']}." for name, found in naive.items() if isinstance(found, dict)]
    if "flops_counted" in row["figures"].get("softmax", {}):
        share = row["figures"]["softmax"]["share_of_peak_transitions_only"]
        lines.append(
            f"The softmax's share of peak counts {row['figures']['softmax']['flops_counted']}. "
            f"Counting transitions alone it is {share:.0%}."
        )
    lines += [f"{part}: not measured ({row['figures'][part]['error']})." for part in row["incomplete"]]
    growth = row["figures"].get("growth", {})
    if "ratio" in growth:
        states, tokens = sizes["growth_pair"], sizes["growth_batch_tokens"]
        lines.append(
            f"At {tokens:,} tokens per step {states[1]} states run at {growth['ratio']:.2f} times the speed of {states[0]}: "
            "what a step does to every state weighs more."
        )
    skipped = growth.get("skipped")
    if skipped:
        lines.append(f"No time was left for: {'; '.join(skipped)}.")
    return "\n".join(f"- {line}" for line in lines)


def table(header: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table, columns aligned."""
    rows = [header, *lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    rendered = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rendered.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(rendered)


def shown(value: Any) -> str:
    """Return a figure for people; a dash for what was not measured."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value and abs(value) < 1e-2:
            return f"{value:.1e}"
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return str(value)

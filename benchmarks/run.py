"""The whole benchmark: parts in turn, each figure with what it is compared with, one row at the end.

Input: sizes and a corpus by name. Output: a dict of plain JSON values, with the promised keys of HEADLINES.
"""

import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine, material
from benchmarks.contest import Figures, Timer, climb, contest, paired_ratio
from benchmarks.errors import WorkerError
from benchmarks.extrapolation import at_size
from benchmarks.growth import Point, measure_growth
from benchmarks.hosts import Inline, Launch, Process
from benchmarks.sizes import FULL, Sizes
from vlhmm.config import unknown
from vlhmm.data import Corpus

FLOPS_COUNTED = (
    "matrix products, two operations a multiply-add: for rows of blocks that occur the logits for the "
    "normalizer, the same again in the gradient pass and the two products of the gradient; three residual "
    "networks and the emission logits, each forward and backward"
)
HEADLINES = (
    "block_factored_vs_lstm",
    "block_factored_vs_naive",
    "naive_extrapolated",
    "softmax_share_of_peak",
    "softmax_peak_gb",
    "estep_tokens_per_s",
    "states_2_17_vs_2_15",
    "states_2_17_peak_gb",
    "scoring_tokens_per_s",
    "scoring_max_abs_diff",
)


class Bench:
    """One benchmark under way. `run_bench` is the way in."""

    def __init__(
        self,
        sizes: Sizes,
        corpus: Corpus,
        folder: Path,
        timer: Timer,
        launch: Launch,
        note: Callable[[str], None],
        common: Figures,
    ) -> None:
        self.sizes, self.corpus, self.folder, self.timer = sizes, corpus, folder, timer
        self.launch, self.note, self.common = launch, note, common
        self.tiny_machine = {"matmul_size": 64, "matmul_seconds": 0.01, "megabytes": 1} if sizes.name == "tiny" else {}

    def settings(self, num_states: int, num_blocks: int, **more: Any) -> Figures:
        """Return what a worker is told; the blocks it will read are there."""
        material.write_blocks(self.corpus, num_blocks, self.sizes.exchange_sweeps, self.folder)
        sizes = self.sizes
        shared = {
            "hidden_size": sizes.hidden_size,
            "state_dropout": sizes.state_dropout,
            "batch_tokens": sizes.batch_tokens,
        }
        return {**self.common, **shared, "num_states": num_states, "num_blocks": num_blocks, **more}

    # ---- the parts

    def machine(self) -> Figures:
        """Matrix products and copies, alone."""
        found = contest({"machine": ("machine", {**self.common, **self.tiny_machine})}, 3, self.launch, self.timer)[
            "machine"
        ]
        self.note(
            f"  {found['matmul_gflops']:.0f} GFLOP/s in matrix products, {found['copy_gb_per_s']:.0f} GB/s copying"
        )
        return found

    def training(self) -> Figures:
        """Block-factored by gradient (linear maps; residual networks; low-rank within blocks) and two LSTMs, in turn."""
        sizes = self.sizes
        ours = self.settings(sizes.num_states, sizes.num_blocks, transition="block-factored")
        entries = {
            "machine": ("machine", {**self.common, **self.tiny_machine}),
            "block_factored": ("block-factored", ours),
            "block_factored_residual": ("block-factored", {**ours, "network": "residual"}),
            "low_rank": ("block-factored", {**ours, "within": "low-rank"}),
            "lstm": ("lstm", ours),
            "package_lstm": ("package-lstm", ours),
        }
        found = contest(entries, sizes.rounds, self.launch, self.timer)
        hmms = ("block_factored", "block_factored_residual", "low_rank")
        for label in hmms:
            found[label] |= {"num_states": sizes.num_states, "num_blocks": sizes.num_blocks}
        for label in (*hmms, "lstm", "package_lstm"):
            self.note(f"  {label}: {speed(found[label])}")
        return {
            **found,
            "block_factored_vs_lstm": paired_ratio(found["block_factored"], found["lstm"]),
            "block_factored_residual_vs_lstm": paired_ratio(found["block_factored_residual"], found["lstm"]),
            "low_rank_vs_lstm": paired_ratio(found["low_rank"], found["lstm"]),
            "block_factored_vs_package_lstm": paired_ratio(found["block_factored"], found["package_lstm"]),
        }

    def softmax(self) -> Figures:
        """Return the paper's model, streamed, beside the machine's matrix-product rate."""
        sizes = self.sizes
        # the reference implementation of a softmax row is |Z| wide: fewer tokens to check
        settings = self.settings(sizes.softmax_states, sizes.softmax_blocks, transition="softmax", check_tokens=8)
        entries = {
            "machine": ("machine", {**self.common, **self.tiny_machine}),
            "softmax": ("softmax", settings),
        }
        found = contest(entries, sizes.softmax_rounds, self.launch, self.timer)
        rates = zip(found["softmax"]["rounds"], found["machine"]["rounds"], strict=True)
        shares = [
            (s["flops"] / peak, s["transition_flops"] / peak)
            for s, m in rates
            for peak in [m["matmul_gflops"] * 1e9 * s["seconds"]]
        ]
        share, transition_share = (median(part) for part in zip(*shares, strict=True))
        self.note(f"  {speed(found['softmax'])}, {share:.0%} of the matrix-product rate")
        return {
            **found["softmax"],
            "num_states": sizes.softmax_states,
            "num_blocks": sizes.softmax_blocks,
            "matmul_gflops": found["machine"]["matmul_gflops"],
            "share_of_peak": share,
            "share_of_peak_transitions_only": transition_share,
            "flops_counted": FLOPS_COUNTED,
        }

    def em(self) -> Figures:
        """Generalized EM: the E-step, and the whole iteration."""
        sizes = self.sizes
        settings = self.settings(
            sizes.em_states, sizes.em_blocks, transition="block-factored", method="em",
            em_tokens=sizes.em_tokens, batch_tokens=sizes.em_batch_tokens,
        )  # fmt: skip
        found = contest({"em": ("em", settings)}, sizes.em_rounds, self.launch, self.timer)["em"]
        estep = median(r["tokens"] / r["estep_seconds"] for r in found["rounds"])
        self.note(f"  E-step {estep:,.0f} tokens/s; whole iteration {speed(found)}")
        return {
            **found,
            "num_states": sizes.em_states,
            "num_blocks": sizes.em_blocks,
            "estep_tokens_per_s": estep,
        }

    def scoring(self) -> Figures:
        """Return a long text, all its tiles cached."""
        sizes = self.sizes
        settings = self.settings(
            sizes.scoring_states, sizes.scoring_blocks,
            scoring_tokens=sizes.scoring_tokens, scoring_sample=sizes.scoring_sample,
        )  # fmt: skip
        found = contest({"scoring": ("scoring", settings)}, sizes.scoring_rounds, self.launch, self.timer)["scoring"]
        first = found["tokens"] / found["first_pass_seconds"]
        self.note(f"  {speed(found)}; {first:,.0f} tokens/s in the first pass")
        sized = {"num_states": sizes.scoring_states, "num_blocks": sizes.scoring_blocks}
        return {**found, **sized, "first_pass_tokens_per_s": first}

    def naive(self) -> Figures:
        """Return what one would write first, in two variants, at the largest size each reaches."""
        sizes = self.sizes
        found: Figures = {}
        for variant in ("dense", "blocked"):
            settings = {
                **self.common, "variant": variant,
                "hidden_size": sizes.hidden_size, "batch_tokens": sizes.batch_tokens,
                "naive_states": sizes.naive_states, "naive_states_per_block": sizes.naive_states_per_block,
                "naive_gb": sizes.naive_gb, "naive_seconds": sizes.naive_seconds,
            }  # fmt: skip
            try:
                # it keeps to its seconds by itself; the rest is for starting up and for a machine that slows down
                climbed = climb(("naive", settings), 30 + 1.5 * sizes.naive_seconds, self.launch, self.timer)
                if not climbed["sizes"]:
                    raise WorkerError(f"naive, {variant}: it held no size at all: {climbed['ended']}")
                reached = at_size(climbed, variant, sizes.num_states, len(self.corpus.vocabulary), sizes.hidden_size)
            except WorkerError as error:
                if variant == "dense":  # the promised figure
                    raise
                found["blocked_error"] = str(error)
                self.note(f"  not measured: {error}")
                continue
            found[variant] = climbed | reached
            largest = climbed["sizes"][-1]
            self.note(
                f"  {variant}: {found[variant]['measured_tokens_per_s']:,.1f} tokens/s at "
                f"{largest['num_states']} states ({climbed['ended']}), "
                f"{found[variant]['tokens_per_s']:,.2f} at {sizes.num_states}"
                f"{', extrapolated' if found[variant]['extrapolated'] else ''}"
            )
        return found

    def growth(self) -> Figures:
        """Return the block-factored model at other sizes."""

        def settings(point: Point) -> Figures:
            return self.settings(
                point.num_states,
                point.num_blocks,
                transition="block-factored",
                batch_tokens=point.batch_tokens,
                within=point.within,
            )

        return measure_growth(self.sizes, settings, self.launch, self.timer, self.note)


def speed(figures: Figures) -> str:
    """Return tokens per second and peak memory, for people."""
    return f"{figures['tokens_per_s']:,.0f} tokens/s, {figures['peak_gb'] or 0:.1f} GB"


PARTS = ("machine", "training", "softmax", "em", "scoring", "naive", "growth")


def chosen_parts(only: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the parts to run, in order; refuse an unknown one with the nearest name."""
    if only is None:
        return PARTS
    names = [name.strip() for name in only.split(",")] if isinstance(only, str) else list(only)
    for name in names:
        if name not in PARTS:
            raise unknown("part of the benchmark", name, list(PARTS))
    return tuple(part for part in PARTS if part in names)


def run_bench(
    sizes: Sizes = FULL,
    *,
    corpus: str = "ptb",
    data_dir: str | None = None,
    only: str | Iterable[str] | None = None,
    threads: int | None = None,
    memory: int | None = None,
    seed: int = 0,
    note: Callable[[str], None] = lambda line: None,
    inline: bool = False,
) -> Figures:
    """Return the benchmark's row: headlines, the figures behind them, sizes, machine, commit, seconds.

    A part that could not be measured has an `error` in its figures, and its headlines are None; a program
    that is not exact ends everything. `inline` runs all in this process, for tests.
    """
    parts, timer = chosen_parts(only), Timer(sizes.seconds)
    described = machine.describe(threads)
    load = described["load_at_start"]
    if load is not None and load > 0.5:
        note(f"this machine is busy (load {load:.1f}): what is measured now is rough, ratios less so")
    text, instead = material.choose_corpus(corpus, data_dir, sizes.train_tokens, seed)
    if instead:
        note(f"{instead}: measuring on {text.name} instead")
    note(f"{text.name}: {text.train.num_tokens:,} training tokens, {len(text.vocabulary):,} words")
    figures: Figures = {}
    incomplete = []
    with tempfile.TemporaryDirectory(prefix="vlhmm-bench-") as scratch:
        folder = Path(scratch)
        material.write_corpus(text, folder)
        common = {"folder": scratch, "threads": threads, "memory": memory, "seed": seed}
        bench = Bench(sizes, text, folder, timer, Inline if inline else Process, note, common)
        for part in parts:
            before = timer.spent
            note(f"[{before:4.0f} s] {part}: {(getattr(Bench, part).__doc__ or '').strip()}")
            try:
                if timer.left <= 0:
                    raise WorkerError(f"the benchmark's time ({sizes.seconds:.0f} s) was up")
                figures[part] = getattr(bench, part)()
            except WorkerError as error:
                note(f"  not measured: {error}")
                figures[part] = {"error": str(error)}
                incomplete.append(part)
            figures[part]["part_seconds"] = timer.spent - before
    row = {
        **headlines(figures),
        "quick": sizes.name == "quick",
        "sizes": sizes.name,
        "sizes_measured": asdict(sizes),
        "parts": list(parts),
        "incomplete": incomplete,
        "corpus": text.name,
        "corpus_asked_for": corpus,
        "corpus_instead": instead,
        "vocabulary": len(text.vocabulary),
        "train_tokens": text.train.num_tokens,
        "seconds": timer.spent,
        "machine": described,
        "commit": machine.commit(),
        "figures": figures,
    }
    return rounded(row)


def headlines(figures: Figures) -> Figures:
    """Return the promised keys, None where a part was not measured; then figures a reader will ask for next."""

    def get(*path: str) -> Any:
        value: Any = figures
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    ours = get("training", "block_factored", "tokens_per_s")

    def by(theirs: float | None) -> float | None:
        return ours / theirs if ours and theirs else None

    large_points = get("growth", "low_rank", "points")
    return {
        "block_factored_vs_lstm": get("training", "block_factored_vs_lstm"),
        "block_factored_vs_naive": by(get("naive", "dense", "tokens_per_s")),
        "naive_extrapolated": get("naive", "dense", "extrapolated"),
        "softmax_share_of_peak": get("softmax", "share_of_peak"),
        "softmax_peak_gb": get("softmax", "peak_gb"),
        "estep_tokens_per_s": get("em", "estep_tokens_per_s"),
        "states_2_17_vs_2_15": get("growth", "low_rank", "ratio"),
        "states_2_17_peak_gb": large_points[1]["peak_gb"] if large_points else None,
        "scoring_tokens_per_s": get("scoring", "tokens_per_s"),
        "scoring_max_abs_diff": get("scoring", "check", "max_abs_diff"),
        "states_2_17_tokens_a_step": large_points[1]["batch_tokens"] if large_points else None,
        "states_2_17_within": large_points[1]["within"] if large_points else None,
        "states_2_17_tokens_per_s": large_points[1]["tokens_per_s"] if large_points else None,
        "states_2_17_vs_2_15_softmax_within": get("growth", "large_batch", "ratio"),
        "states_2_17_vs_2_15_small_steps": get("growth", "ratio"),
        "states_2_17_small_steps_peak_gb": get("growth", "large_peak_gb"),
        "block_factored_tokens_per_s": ours,
        "block_factored_peak_gb": get("training", "block_factored", "peak_gb"),
        "lstm_tokens_per_s": get("training", "lstm", "tokens_per_s"),
        "block_factored_residual_vs_lstm": get("training", "block_factored_residual_vs_lstm"),
        "low_rank_vs_lstm": get("training", "low_rank_vs_lstm"),
        "low_rank_tokens_per_s": get("training", "low_rank", "tokens_per_s"),
        "block_factored_vs_package_lstm": get("training", "block_factored_vs_package_lstm"),
        "em_iteration_tokens_per_s": get("em", "tokens_per_s"),
        "em_peak_gb": get("em", "peak_gb"),
        "softmax_tokens_per_s": get("softmax", "tokens_per_s"),
        "naive_tokens_per_s": get("naive", "dense", "tokens_per_s"),
        "naive_measured_states": get("naive", "dense", "measured_states"),
        "block_factored_vs_naive_blocked": by(get("naive", "blocked", "tokens_per_s")),
        "scoring_peak_gb": get("scoring", "peak_gb"),
        "matmul_gflops": get("machine", "matmul_gflops"),
    }


def rounded(value: Any) -> Any:
    """Return the same with six significant digits, and None for what is no finite number: plain JSON."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value

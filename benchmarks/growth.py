"""How speed and memory grow: with |Z| at fixed k, with k at fixed |Z|, with tokens a step; and the plot."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contest import Timer, contest, paired_ratio
from benchmarks.hosts import Launch
from benchmarks.sizes import Sizes
from vlhmm.data.atomic_io import replace_atomically
from vlhmm.errors import ConfigError

SERIES = {"states": "states, k fixed", "k": "states per block k, states fixed", "tokens": "tokens a step"}


class Point(NamedTuple):
    """One size of the block-factored model, trained by gradient."""

    num_states: int
    states_per_block: int
    batch_tokens: int
    within: str = "softmax"

    @property
    def num_blocks(self) -> int:
        return self.num_states // self.states_per_block

    def __str__(self) -> str:
        how = "" if self.within == "softmax" else f", {self.within} within blocks"
        return f"{self.num_states} states, k={self.states_per_block}, {self.batch_tokens} tokens a step{how}"


def pair(sizes: Sizes) -> tuple[Point, Point]:
    """The base and the large model, which are measured side by side."""
    small, large = sizes.growth_pair
    k, tokens = sizes.growth_states_per_block, sizes.growth_batch_tokens
    return Point(small, k, tokens), Point(large, k, tokens)


def others(sizes: Sizes) -> Iterator[Point]:
    """The remaining points: states, tokens and k in turn, so that a run cut short has some of each."""
    base, _ = pair(sizes)
    lists = [
        [base._replace(num_states=n) for n in sizes.growth_states],
        [base._replace(batch_tokens=n) for n in sizes.growth_tokens],
        [base._replace(states_per_block=n) for n in sizes.growth_k],
    ]
    while any(lists):
        for waiting in lists:
            if waiting:
                yield waiting.pop(0)


def measure_growth(
    sizes: Sizes,
    settings: Callable[[Point], dict[str, Any]],
    launch: Launch,
    timer: Timer,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """{ratio, large_batch, low_rank, points, skipped, …}: the large model's speed by the base's, at small and large steps.

    `low_rank` is the pair with low-rank factors within blocks, at the largest steps: no tiles to be made.
    """

    def beside(base: Point, large: Point) -> dict[str, Any]:
        """The two measured in turns: {ratio, points}."""
        entries = {str(point): ("block-factored", settings(point)) for point in (base, large)}
        together = contest(entries, sizes.growth_rounds, launch, timer)
        points = [described(point, together[str(point)]) for point in (base, large)]
        ratio = paired_ratio(together[str(large)], together[str(base)])
        note(
            f"  {large.num_states} states beside {base.num_states}, {base.batch_tokens:,} tokens a step, "
            f"{base.within} within blocks: "
            f"{points[1]['tokens_per_s']:,.0f} and {points[0]['tokens_per_s']:,.0f} tokens/s, {ratio:.2f}"
        )
        return {"ratio": ratio, "points": points}

    base, large = pair(sizes)
    small_steps = beside(base, large)
    points = small_steps["points"]
    large_steps = beside(*(point._replace(batch_tokens=sizes.growth_large_batch) for point in (base, large)))
    low_rank = beside(*(p._replace(batch_tokens=sizes.growth_low_rank_batch, within="low-rank") for p in (base, large)))
    skipped, longest = [], 0.0
    for point in others(sizes):
        if timer.left < 1.4 * longest:
            skipped.append(str(point))
            continue
        before = timer.spent
        alone = contest({str(point): ("block-factored", settings(point))}, sizes.growth_rounds, launch, timer)
        longest = max(longest, timer.spent - before)
        points.append(described(point, alone[str(point)]))
        note(f"  {point}: {points[-1]['tokens_per_s']:,.0f} tokens/s, {points[-1]['peak_gb'] or 0:.1f} GB")
    return {
        "ratio": small_steps["ratio"],
        "large_peak_gb": points[1]["peak_gb"],
        "points": points,
        "large_batch": large_steps,
        "low_rank": low_rank,
        "skipped": skipped,
    }


def described(point: Point, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        **point._asdict(),
        "num_blocks": point.num_blocks,
        "tokens_per_s": figures["tokens_per_s"],
        "seconds_per_step": figures["seconds"],
        "peak_gb": figures["peak_gb"],
        "check": figures["check"],
        "parameters": figures["parameters"],
    }


def series(points: list[dict[str, Any]]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """By series, its (x, point) from small to large; the base, which is the first point, is in all of them."""
    base = points[0]
    axes = {"states": "num_states", "k": "states_per_block", "tokens": "batch_tokens"}
    found = {}
    for name, axis in axes.items():
        fixed = {field: base[field] for field in axes.values() if field != axis}
        chosen = [p for p in points if all(p[field] == value for field, value in fixed.items())]
        found[name] = sorted(((p[axis], p) for p in chosen), key=lambda entry: entry[0])
    return found


def require_plots() -> None:
    """Refuse a machine without matplotlib before anything is measured."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install 'vlhmm[plots]', or drop --plot")


def plot(points: list[dict[str, Any]], sizes: Sizes, path: str | Path) -> None:
    """Draw tokens/s above, peak memory below, one column per series, into `path`."""
    require_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(SERIES), sharex="col", squeeze=False)
    for column, (name, entries) in enumerate(series(points).items()):
        x = [n for n, _ in entries]
        for row, (field, label) in enumerate(
            {"tokens_per_s": "training tokens/s", "peak_gb": "peak memory, GB"}.items()
        ):
            axes = grid[row, column]
            axes.plot(x, [p[field] or 0.0 for _, p in entries], marker="o", color="#1f5f8b")
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            if column == 0:
                axes.set_ylabel(label)
        grid[1, column].set_xlabel(SERIES[name])
    base, _ = pair(sizes)
    figure.suptitle(f"block-factored HMM, by gradient; base: {base}, λ={sizes.state_dropout}, h={sizes.hidden_size}")
    with replace_atomically(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")

"""Rows and records -> Markdown, text, JSON values and PNG: the paper's number beside ours."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paper import reported as paper
from paper.records import Record, Store, changed_settings
from paper.rows import Row
from paper.tables import CORPUS_TITLES, TITLES, table
from vlhmm.data.atomic_io import replace_atomically, write_atomically
from vlhmm.errors import ConfigError, DataError

DOCUMENTS = ("docs/reproduction.md", "README.md")
MARKED = re.compile(r"(<!-- paper (\S+?)(?: (short))? -->)\n.*?(<!-- end -->)", re.DOTALL)
OPENING = re.compile(r"<!-- paper ")
FIGURES = ("figure-states", "figure-factored")

LEGEND = (
    "Perplexities are valid / test, of the model that is best on valid. reset: every line starts from the initial "
    "distribution. carry: the state is carried over line ends in 16 streams, as the paper evaluates (through transitions "
    "out of `<eos>` that a model trained under reset has never seen). Wall time is training with its validations."
)


# ---- values


def row_values(row: Row, store: Store, seed: int) -> dict[str, Any]:
    """Return one row as JSON values; `valid` and `test` are under `context`, the rule the model was trained by."""
    record, others = chosen(row, store, seed)
    reported = row.reported or paper.Reported()
    values: dict[str, Any] = {
        "table": row.table,
        "corpus": row.corpus,
        "row": row.full_name,
        "model": row.model,
        "num_states": row.num_states,
        "num_blocks": row.num_blocks,
        "parameters": None,
        "context": row.run.recipe.context() if row.run else None,
        "valid": None,
        "test": None,
        "paper_valid": reported.valid,
        "paper_test": reported.test,
        "epochs": None,
        "wall_s": None,
        "seed": seed if row.run else None,
        "command": row.command(seed) if row.run else None,
        "status": "missing" if row.run else "cited",
        "run": row.run.name if row.run else None,
        "note": row.run.note if row.run else f"cited by the paper from {reported.source}",
        "paper_parameters": reported.parameters,
        "paper_train": reported.train,
        "paper_ms_per_batch": reported.ms_per_batch,
        "paper_seconds_per_epoch": paper_seconds(row),
        "paper_source": reported.source or None,
    }
    if record is None or row.run is None:
        return values
    rules = {f"{split}_{rule}": record.score(split, rule) for split in ("valid", "test") for rule in ("reset", "carry")}
    return values | {
        "parameters": record.parameters,
        "num_states": record.settings.get("model", {}).get("num_states", row.num_states),
        "num_blocks": record.settings.get("model", {}).get("num_blocks", row.num_blocks),
        "context": record.context,
        "valid": record.score("valid", record.context),
        "test": record.score("test", record.context),
        **rules,
        "train": record.score("train", record.context),
        "ms_per_batch": record.extras.get("ms_per_batch"),
        "ms_per_batch_cached": record.extras.get("ms_per_batch_cached"),
        "epochs": record.epochs,
        "epochs_planned": record.epochs_planned,
        "progress": record.progress,
        "wall_s": record.wall_s,
        "seconds_per_epoch": record.wall_s / record.epochs if record.epochs else None,
        "tokens": record.tokens,
        "seed": record.seed,
        "command": row.command(record.seed),
        "train_command": record.train_command,
        "status": record.status,
        "note": record.note,
        "commit": record.commit,
        "machine": record.machine,
        "ended": record.ended,
        "changed_settings": changed_settings(record, row.run),
        "uncalibrated_valid": store.uncalibrated_valid(record),
        "regularization": regularization(record.settings.get("training")),
        "other_seeds": [
            {"seed": other.seed}
            | {
                f"{split}_{rule}": other.score(split, rule)
                for split in ("valid", "test")
                for rule in ("reset", "carry")
            }
            for other in others
        ],
    }


def chosen(row: Row, store: Store, seed: int) -> tuple[Record | None, list[Record]]:
    """Return the record to show (of that seed, else a finished one, else any) and the other finished ones."""
    if row.run is None:
        return None, []
    records = list(store.all_seeds(row.run.name))
    ranked = sorted(records, key=lambda record: (record.seed != seed, not record.is_finished))
    if not ranked:
        return None, []
    return ranked[0], [record for record in records if record is not ranked[0] and record.is_finished]


def paper_seconds(row: Row) -> float | None:
    """Return the paper's seconds per epoch, where it states them."""
    if (row.table, row.corpus) != ("table1", "ptb"):
        return None
    return paper.SECONDS_PER_EPOCH.get(row.name.removesuffix("-softmax").removesuffix("-em"))


# ---- cells


def number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def pair(valid: float | None, test: float | None) -> str:
    return "–" if valid is None and test is None else f"{number(valid)} / {number(test)}"


def paper_pair(values: dict[str, Any]) -> str:
    return pair(values["paper_valid"], values["paper_test"])


def ours(rule: str) -> Callable[[dict[str, Any]], str]:
    """Format valid / test under a rule, with the other seeds in brackets; bold for the rule of training."""

    def cell(values: dict[str, Any]) -> str:
        valid, test = values.get(f"valid_{rule}"), values.get(f"test_{rule}")
        if values["status"] == "unfinished":
            return "" if valid is None else f"{number(valid)} so far"
        if values["status"] != "finished":
            return ""
        text = pair(valid, test)
        if rule == values["context"]:
            text = f"**{text}**"
        for other in values["other_seeds"]:
            text += f" (seed {other['seed']}: {pair(other[f'valid_{rule}'], other[f'test_{rule}'])})"
        return text

    return cell


def status(values: dict[str, Any]) -> str:
    kind = values["status"]
    if kind == "cited":
        return f"cited: {values['paper_source']}"
    if kind == "missing":
        return "not run yet"
    if kind == "unfinished":
        return f"unfinished: epoch {values['epochs']:g} of {values['epochs_planned']:g}"
    return "finished, settings changed since" if values["changed_settings"] else "finished"


def size(values: dict[str, Any]) -> str:
    """Format our number of parameters, with the paper's in brackets."""
    shown = [millions(values["parameters"])] if values["parameters"] else []
    if values["paper_parameters"]:
        shown.append(f"({millions(values['paper_parameters'])})")
    return " ".join(shown)


def millions(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count < 20e6 else f"{count / 1e6:.0f}M"


def wall(values: dict[str, Any]) -> str:
    if values["wall_s"] is None or values["status"] == "missing":
        return ""
    threads = (values.get("machine") or {}).get("threads", 1)
    return hours(values["wall_s"]) + (f", {threads} cores" if threads > 1 else "")


def hours(seconds: float) -> str:
    """Format a duration as 1 h 05 min, 12 min or 40 s."""
    if seconds < 59.5:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def plain(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda values: "" if values.get(name) is None else str(values[name])


def count(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda values: "" if values.get(name) is None else f"{values[name]:,}"


def epochs(values: dict[str, Any]) -> str:
    return "" if values["epochs"] is None else f"{values['epochs']:g}"


def train_valid_time(names: tuple[str, str, str]) -> Callable[[dict[str, Any]], str]:
    return lambda values: " / ".join(number(values.get(name), 0 if i == 2 else 1) for i, name in enumerate(names))


def ablation(values: dict[str, Any]) -> str:
    return train_valid_time(("train", "valid", "ms_per_batch"))(values) if values["status"] == "finished" else ""


Column = tuple[str, Callable[[dict[str, Any]], str]]
COLUMNS: list[Column] = [
    ("model", plain("model")),
    ("states", count("num_states")),
    ("parameters (paper)", size),
    ("paper, valid / test", paper_pair),
    ("ours, reset", ours("reset")),
    ("ours, carry", ours("carry")),
    ("epochs", epochs),
    ("wall time", wall),
    ("status", status),
]
ABLATION_COLUMNS: list[Column] = [
    *COLUMNS[:3],
    ("paper, train / valid / ms", train_valid_time(("paper_train", "paper_valid", "paper_ms_per_batch"))),
    ("ours, train / valid / ms", ablation),
    *COLUMNS[4:],
]
HOW_COLUMNS: list[Column] = [
    ("row", plain("row")),
    ("command", lambda values: f"`{values['command']}`"),
    ("seed", plain("seed")),
    ("context rule of training", plain("context")),
    (
        "tokens, train / valid / test",
        lambda values: " / ".join(f"{n:,}" for n in values.get("tokens", {}).values()),
    ),
    ("time per epoch (paper)", lambda values: epoch_time(values)),
    ("commit", plain("commit")),
    ("how it differs from the paper", lambda values: differences(values)),
]


def epoch_time(values: dict[str, Any]) -> str:
    mine, theirs = values.get("seconds_per_epoch"), values["paper_seconds_per_epoch"]
    return " ".join(filter(None, [hours(mine) if mine else "", f"({theirs:g} s, RTX 2080)" if theirs else ""]))


def differences(values: dict[str, Any]) -> str:
    changed, before = values.get("changed_settings"), values.get("uncalibrated_valid")
    parts = [
        values["note"],
        values.get("regularization"),
        before and f"valid {before:.1f} before calibration",
        changed and f"settings changed since: {', '.join(changed)}",
    ]
    return "; ".join(filter(None, parts))


def regularization(training: dict[str, Any] | None) -> str | None:
    """Return the regularization of an HMM trained with AdamW; None for other models."""
    if training is None or training["optimizer"] != "adamw":
        return None
    return (
        f"AdamW at {training['rate']:g}, weight decay {training['weight_decay']:g}, state dropout "
        f"{training['state_dropout']:g}, embedding dropout {training['embedding_dropout']:g}"
    )


# ---- tables


SHORT_ROWS = ("lstm", "vlhmm-softmax", "vlhmm-em", "vlhmm-read-65536")
SHORT_COLUMNS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("corpus", lambda values: CORPUS_TITLES.get(values["corpus"], values["corpus"])),
    ("model", lambda values: values["model"]),
    ("paper", paper_pair),
    ("ours", lambda values: ours(values["context"])(values).replace("**", "")),
    ("context", lambda values: values["context"]),
    ("command", lambda values: f"`{values['command']}`"),
    ("record", lambda values: f"[json](results/rows/{values['run']}-seed{values['seed']}.json)"),
]


def short_markdown(rows: list[dict[str, Any]]) -> str:
    """Return a selection of rows in one table, each with its command and its record."""
    shown = [v for v in rows if v["row"].split("/")[-1] in SHORT_ROWS and v["status"] == "finished"]
    return pipes(shown, SHORT_COLUMNS) + "\n"


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return one table per corpus, then how each row was trained."""
    parts = []
    for corpus, members in by_corpus(rows):
        if len({values["corpus"] for values in rows}) > 1:
            parts.append(f"**{CORPUS_TITLES.get(corpus, corpus)}**")
        parts.append(pipes(members, columns_of(members)))
    parts.append(legend(rows))
    trained = [values for values in rows if values["status"] != "cited"]
    if trained:
        parts.append(
            "<details><summary>How each row was trained</summary>\n\n" + pipes(trained, HOW_COLUMNS) + "\n\n</details>"
        )
    return "\n\n".join(parts) + "\n"


def text(rows: list[dict[str, Any]]) -> str:
    """Return the same tables in columns, for a terminal."""
    parts = []
    for corpus, members in by_corpus(rows):
        lines = [[name for name, _ in columns_of(members)]]
        lines += [[cell(values).replace("**", "") for _, cell in columns_of(members)] for values in members]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        body = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        parts.append("\n".join([CORPUS_TITLES.get(corpus, corpus), *body]))
    return "\n\n".join([*parts, legend(rows, bold=False)]) + "\n"


def columns_of(rows: list[dict[str, Any]]) -> list[Column]:
    return ABLATION_COLUMNS if rows[0]["table"] == "table2" else COLUMNS


def by_corpus(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    corpora = list(dict.fromkeys(values["corpus"] for values in rows))
    return [(corpus, [values for values in rows if values["corpus"] == corpus]) for corpus in corpora]


def pipes(rows: list[dict[str, Any]], columns: list[Column]) -> str:
    lines = [[name for name, _ in columns], ["---"] * len(columns)]
    lines += [[cell(values).replace("|", "\\|") for _, cell in columns] for values in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def legend(rows: Iterable[dict[str, Any]], bold: bool = True) -> str:
    """Return the legend: what the numbers mean, and on which machines they were computed."""
    rows = list(rows)
    parts = [LEGEND]
    if bold and any(values["status"] == "finished" for values in rows):
        parts.append("**Bold** is the context rule of training and model selection.")
    if any(values["table"] == "table2" for values in rows):
        parts.append(
            "Train is the selected model's perplexity on the training text with all states; ms is the time of one "
            "evaluation batch of 16 x 32 tokens, parameters included (paper: on an RTX 2080)."
        )
    several = len(by_corpus(rows)) > 1
    calibrated = [
        f"{values['model']}{' on ' + CORPUS_TITLES[values['corpus']] if several else ''} {values['uncalibrated_valid']:.1f}"
        for values in rows
        if values.get("uncalibrated_valid") is not None
    ]
    if calibrated:
        parts.append(
            "Ours are calibrated on the validation text, the paper's models are not, so compare the test numbers. "
            f"Valid before calibration: {'; '.join(calibrated)}."
        )
    if any("our LSTM" in values["model"] and values["status"] == "finished" for values in rows):
        parts.append("Wall times of rows distilled from our LSTM include its training.")
    machines = {values["machine"]["processor"] for values in rows if (values.get("machine") or {}).get("processor")}
    if machines:
        parts.append(f"Trained on {'; '.join(sorted(machines))}, one core unless stated otherwise.")
    return " ".join(parts)


def cost_lines(costs: list[dict[str, Any]]) -> list[str]:
    """Return one line per missing row, and the sum."""
    if not costs:
        return ["nothing is missing"]
    width = max(len(cost["row"]) for cost in costs)
    lines = [f"{cost['row']:<{width}}  {hours(cost['seconds']):>11}  {cost['basis']}" for cost in costs]
    total = sum(cost["seconds"] for cost in costs)
    return [*lines, f"{'total':<{width}}  {hours(total):>11}  {len(costs)} run{'s' * (len(costs) > 1)}"]


# ---- documents


def write_documents(folder: Path, store: Store, seed: int, only: list[str] | None = None) -> list[Path]:
    """Update the tables between markers (`only`: these tables), and return the documents that changed."""
    if not (folder / DOCUMENTS[0]).exists():
        raise ConfigError(f"{folder / DOCUMENTS[0]} does not exist; run --write-docs in a checkout of vlhmm")
    changed = []
    for name in DOCUMENTS:
        path = folder / name
        if not path.exists():
            continue
        before = path.read_text(encoding="utf-8")
        after = filled(before, path, store, seed, only)
        if after != before:
            write_atomically(path, after.encode())
            changed.append(path)
    return changed


def filled(content: str, path: Path, store: Store, seed: int, only: list[str] | None = None) -> str:
    """Return the document with a fresh table between each pair of markers."""
    if len(OPENING.findall(content)) != len(MARKED.findall(content)):
        raise DataError(f"{path} has a marker <!-- paper … --> without its <!-- end -->; add it")

    def place(match: re.Match[str]) -> str:
        opening, name, short, end = match.groups()
        rows = table(name)
        if only is not None and name not in only:
            return match[0]
        values = [row_values(row, store, seed) for row in rows]
        return f"{opening}\n\n{short_markdown(values) if short else markdown(values)}\n{end}"

    return MARKED.sub(place, content)


# ---- pictures


def plot(name: str, rows: list[dict[str, Any]], source: list[Row], path: str | Path) -> None:
    """Draw a PNG: curves for a figure; for a table, one line per row with the paper's number and ours."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install it with pip install 'vlhmm[plots]'") from None
    if name in FIGURES:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        draw_curves(figure.add_subplot(), name, rows, source)
    else:
        figure = Figure(figsize=(8, 1.2 + 0.3 * len(rows)), layout="constrained")
        draw_rows(figure.add_subplot(), rows)
    try:
        with replace_atomically(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png", metadata={"Software": None})
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from None


def draw_curves(axes: Any, name: str, rows: list[dict[str, Any]], source: list[Row]) -> None:
    """Valid perplexity by x: a curve of the paper's where it has one, a curve a series of ours."""
    for series in dict.fromkeys(row.series for row in source):
        points = [(row.x, values) for row, values in zip(source, rows, strict=True) if row.series == series]
        theirs = [(x, values["paper_valid"]) for x, values in points if values["paper_valid"] is not None]
        if theirs and "paper's" in series:
            label = series.replace("the paper's (softmax)", "").strip(", ")
            axes.plot(
                *zip(*theirs, strict=True),
                "o--",
                label=f"the paper, {label}" if label else "the paper",
                alpha=0.6,
            )
        mine = [(x, values["valid"]) for x, values in points if values["status"] == "finished"]
        if mine:
            label = series.replace("the paper's (softmax)", "the paper's model trained here")
            axes.plot(*zip(*mine, strict=True), "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("states |Z|" if name == "figure-states" else "blocks M")
    axes.set_ylabel("valid perplexity (the paper: carry; ours: as trained)")
    axes.set_title(TITLES.get(name, name), fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def draw_rows(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the paper's valid perplexity (test, if it has no other) as a ring, ours as a dot."""
    labels = [f"{values['corpus']}: {values['model']}" for values in rows]
    for y, values in enumerate(rows):
        split = "valid" if values["paper_valid"] is not None or values["paper_test"] is None else "test"
        theirs, mine = values[f"paper_{split}"], values[split]
        if theirs is not None:
            axes.plot([theirs], [y], "o", mfc="none", color="tab:gray", label="the paper" if y == 0 else None)
        if mine is not None:
            finished = values["status"] == "finished"
            axes.plot([mine], [y], "o" if finished else "x", color="tab:blue")
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("valid perplexity (test where the paper has no other); ring: paper, dot: ours, cross: so far")
    axes.xaxis.label.set_size(7)
    axes.grid(alpha=0.3)

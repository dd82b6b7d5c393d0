"""`python -m paper`: train the missing rows of the paper's tables, and render them next to the paper's numbers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vlhmm.cli.common import DATA_DIR, add_machine_options, clock, interruptible, log_to, setup
from vlhmm.cli.main import Parser, run_program
from vlhmm.cli.numbers import duration

TABLES = ("table1", "table2", "table3", "figure-states", "figure-factored")

EPILOG = """\
  table1            main results on Penn Treebank and WikiText-2
  table2            ablations at 2^14 states
  table3            which states may emit which words
  figure-states     2^10 to 2^16 states
  figure-factored   independent or factored state embeddings
  all               all of them

Each row is a named run. Missing runs are trained in order of priority, after an estimate of their cost. Interrupted
runs are resumed, finished ones are never repeated. The test text is evaluated once, with the model that is best on the
validation text.

examples:
  python -m paper table1 --list                           list the rows with their status
  python -m paper table1 --dry-run                        list the missing rows with their cost
  python -m paper table1 --only ptb/kn                    one row; also ptb, 'vlhmm-*' or lstm,ff
  python -m paper table1 --only ptb/vlhmm-em --seed 1     another seed, shown next to the first
  python -m paper all --time-limit 8h                     the same command resumes
  python -m paper all --render --format json | jq '.[] | select(.status == "finished")'
  python -m paper figure-states --render --plot states.png
  python -m paper all --render --write-docs               update docs/reproduction.md and README.md

Records (small, meant to be committed) go to --results, models and checkpoints to --runs.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m paper",
        description="Train the missing rows of a table or figure of the paper, and show it with the paper's numbers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", metavar="TABLE", choices=(*TABLES, "all"), help=f"{', '.join(TABLES)} or all")
    parser.add_argument("--only", metavar="ROW", action="append", default=[], help="only these rows; * matches anything")
    parser.add_argument("--list", action="store_true", help="list the rows with their status, and exit")
    parser.add_argument("--dry-run", action="store_true", help="list the missing rows with their cost, and exit")
    parser.add_argument(
        "--measure", action="store_true", help="with --dry-run: time real steps, half a minute per row"
    )
    parser.add_argument("--render", action="store_true", help="show the table without training")
    parser.add_argument(
        "--time-limit", type=duration, metavar="T", help="stop with a checkpoint after this time: 90s, 15m, 1.5h"
    )
    parser.add_argument("--runs", metavar="DIR", default="runs/reproduce", help="folder of the models (default: runs/reproduce)")
    parser.add_argument("--results", metavar="DIR", default="results/rows", help="folder of the records (default: results/rows)")
    parser.add_argument("--data-dir", metavar="DIR", help=DATA_DIR)
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text", help="of the output (default: text)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the table to a PNG file (needs the extra `plots`)")
    parser.add_argument(
        "--write-docs", action="store_true", help="update the tables in docs/reproduction.md and README.md"
    )
    add_machine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the tables; return 0 if shown, finished or out of time, 130 after an interrupt, 1 or 2 if a row failed."""
    from paper import render, tables
    from paper.records import Store
    from paper.run import missing, selected
    from vlhmm.errors import ConfigError

    if args.measure and not args.dry_run:
        raise ConfigError("--measure belongs to --dry-run; add it")
    if args.plot and args.table == "all":
        raise ConfigError("--plot draws one table or figure; name it instead of all")
    names = list(tables.TABLES) if args.table == "all" else [args.table]
    only = [pattern for part in args.only for pattern in part.split(",") if pattern]
    rows = selected([row for name in names for row in tables.table(name)], only)
    store = Store(args.results)
    tasks = missing(rows, store, args.seed)
    if args.dry_run:
        show_costs(args, tasks, estimated_costs(args, tasks, store))
        return 0
    if args.list:
        show_list(args, rows, store)
        return 0
    code = 0 if args.render or not tasks else train_missing(args, tasks, store)
    values = [render.row_values(row, store, args.seed) for row in rows]
    note = log_to(args.quiet)
    if args.plot:
        render.plot(args.table, values, rows, args.plot)
        note(f"wrote {args.plot}")
    if args.write_docs:
        for path in write_docs(names, store, args.seed):
            note(f"wrote {path}")
    show_tables(args, values)  # last: whoever reads it may have seen enough before its end
    return code


# ---- training


def train_missing(args: argparse.Namespace, tasks: list[Any], store: Any) -> int:
    """Return the exit code after training what could be trained."""
    device = setup(args)
    from paper.render import cost_lines
    from paper.run import Place, reproduce

    note = log_to(args.quiet)
    corpora = load_corpora(tasks, args.data_dir)
    limit = f"; this run ends after {clock(args.time_limit)}" if args.time_limit else ""
    note(f"{len(tasks)} {'run is' if len(tasks) == 1 else 'runs are'} missing{limit}")
    for line in cost_lines(estimated_costs(args, tasks, store)):
        note(f"  {line}")
    with interruptible() as stop_asked:
        place = Place(
            runs=Path(args.runs),
            store=store,
            device=device,
            memory=args.memory,
            threads=args.threads,
            note=note,
            tick=lambda tick: note(tick_line(tick)),
            should_stop=stop_asked,
        )
        outcome = reproduce(tasks, corpora, place, args.time_limit)
    if outcome.unfinished:
        why = f" ({outcome.stopped_by})" if outcome.stopped_by else ""
        note(f"not finished{why}: {', '.join(outcome.unfinished)}; run the same command again to resume")
    if outcome.stopped_by == "interrupt":
        return 130
    return max((error.exit_code for _, error in outcome.failed), default=0)


def load_corpora(tasks: list[Any], data_dir: str | None) -> dict[str, Any]:
    """Return the corpora of all tasks, before anything is started; one that is missing is refused in one line."""
    from vlhmm.data import load_corpus
    from vlhmm.errors import DataError

    names = dict.fromkeys(task.run.corpus for task in tasks)
    corpora = {}
    for name in names:
        try:
            corpora[name] = load_corpus(name, data_dir)
        except DataError as error:
            others = [other for other in names if other != name]
            instead = f"; or leave it out with --only {','.join(others)}" if others else ""
            raise DataError(f"{error}{instead}") from None
    return corpora


def tick_line(tick: Any) -> str:
    best = "*" if tick.valid == tick.best else ""
    left = tick.seconds * (1 - tick.progress) / tick.progress if tick.progress else 0.0
    valid = f"  valid {tick.valid:.1f}{best}" if tick.valid is not None else ""
    return f"{tick.run}  epoch {tick.epoch:.2f}/{tick.epochs:g}{valid}  {clock(tick.seconds)}  eta {clock(left)}"


# ---- showing


def estimated_costs(args: argparse.Namespace, tasks: list[Any], store: Any) -> list[dict[str, Any]]:
    """Return what each missing run would cost, as far as records tell; measured if that was asked for."""
    from paper.costs import expected_cost, measured_cost

    if args.measure:
        device = setup(args)
        corpora = load_corpora(tasks, args.data_dir)
    told = []
    for task in tasks:
        if args.measure:
            cost = measured_cost(task.run, task.seed, corpora[task.run.corpus], device, args.memory)
        else:
            cost = expected_cost(task.run, store, task.seed)
        record = store.get(task.run.name, task.seed)
        told.append(
            {
                "row": task.row.full_name,
                "table": task.row.table,
                "run": task.run.name,
                "seconds": cost.seconds,
                "basis": cost.basis,
                "status": record.status if record else "missing",
                "command": task.row.command(task.seed),
            }
        )
    return told


def show_costs(args: argparse.Namespace, tasks: list[Any], costs: list[dict[str, Any]]) -> None:
    from paper.render import cost_lines

    if args.format == "json":
        print(json.dumps({"missing": costs, "seconds": sum(cost["seconds"] for cost in costs)}))
    elif args.format == "markdown":
        print("| row | hours | known from |\n| --- | --- | --- |")
        print("\n".join(f"| {cost['row']} | {cost['seconds'] / 3600:.2f} | {cost['basis']} |" for cost in costs))
    else:
        print("\n".join(cost_lines(costs)))


def show_list(args: argparse.Namespace, rows: list[Any], store: Any) -> None:
    from paper import render

    values = [render.row_values(row, store, args.seed) for row in rows]
    if args.format == "json":
        print(json.dumps(values))
        return
    width = max(len(value["row"]) for value in values)
    for value in values:
        print(f"{value['table']:<15}  {value['row']:<{width}}  {render.status(value)}  ({value['model']})")


def show_tables(args: argparse.Namespace, values: list[dict[str, Any]]) -> None:
    from paper import render
    from paper.tables import TITLES

    if args.format == "json":
        print(json.dumps(values))
        return
    for name in dict.fromkeys(value["table"] for value in values):
        members = [value for value in values if value["table"] == name]
        title = f"{name}: {TITLES.get(name, name)}"
        if args.format == "markdown":
            print(f"## {title}\n\n{render.markdown(members)}")
        else:
            print(f"{title}\n\n{render.text(members)}")


def write_docs(names: list[str], store: Any, seed: int) -> list[Path]:
    """Return the files that changed: documents with markers, and the figures beside them."""
    from paper import render, tables

    changed = render.write_documents(Path(), store, seed, names)
    for name in names:
        if name in render.FIGURES:
            rows = tables.table(name)
            path = Path("docs") / f"{name}.png"
            render.plot(name, [render.row_values(row, store, seed) for row in rows], rows, path)
            changed.append(path)
    return changed


def main(arguments: list[str] | None = None) -> int:
    return run_program(lambda: build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

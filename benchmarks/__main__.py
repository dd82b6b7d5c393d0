"""`python -m benchmarks`: how fast this machine trains, scores and answers, beside what it is compared with."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from vlhmm.cli.common import add_format, add_machine_options, log_to, setup
from vlhmm.cli.main import Parser, run_program

EPILOG = """\
Measured in one run, each program in a process of its own, checked against its reference implementation before it is timed:
  machine    matrix products and copies             training   block-factored by gradient, beside two LSTMs
  softmax    the paper's softmax, streamed          em         generalized EM: E-step and whole iteration
  scoring    a long text, parameters cached         naive      what one would write first: all tables dense
  growth     other |Z|, k and tokens a step         (--only machine,training picks parts)
Ratios mean something on a busy machine, absolute figures only on a quiet one.

examples:
  python -m benchmarks                                        15 minutes at most
  python -m benchmarks --quick                                3 at most, smaller sizes, labelled so
  python -m benchmarks --format json --out bench.json --markdown bench.md --plot growth.png
  python -m benchmarks queries --run runs/ptb                 next word, samples and infilling of a model
  python -m benchmarks serving --run runs/ptb --out serving.json   a server under load, on this machine
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks",
        description="Measure training, scoring and queries here.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "subject",
        nargs="?",
        choices=("queries", "serving"),
        metavar="queries|serving",
        help="measure queries, or a server under load, instead of training and scoring",
    )
    parser.add_argument(
        "--run",
        dest="run_folder",
        metavar="RUN",
        help="queries: a trained model (default: an untrained one, 2^15 states); serving: needs one",
    )
    parser.add_argument("--requests", type=int, default=10_000, metavar="N", help="serving: how many (default: 10,000)")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, 3 minutes at most")
    parser.add_argument("--only", metavar="PART,PART", help="some parts only")
    parser.add_argument(
        "--corpus", choices=("ptb", "sotu", "synthetic"), default="ptb", help="default: ptb, or what there is"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where ptb lies (default: $VLHMM_DATA)")
    parser.add_argument("--out", metavar="FILE.json", help="the whole row as JSON")
    parser.add_argument("--markdown", metavar="FILE.md", help="the tables")
    parser.add_argument("--plot", metavar="FILE.png", help="the growth curves (needs the extra plots)")
    parser.add_argument("--scale", choices=("full", "quick", "tiny"), help=argparse.SUPPRESS)  # tiny: for tests
    add_format(parser)
    add_machine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """0 when all was measured; 1 if a part could not be, or is not exact."""
    from benchmarks.sizes import SIZES

    check_options(args)
    if args.subject == "serving":
        return run_serving(args)
    if args.subject == "queries" or args.threads is not None:
        setup(args)  # otherwise torch is the workers' business
    sizes = SIZES[args.scale or ("quick" if args.quick else "full")]
    return run_queries(args, sizes) if args.subject == "queries" else run_all(args, sizes)


def run_serving(args: argparse.Namespace) -> int:
    """0 when every request was answered as the library answers it."""
    from benchmarks.serving import bench_serving
    from vlhmm.data.atomic_io import write_atomically
    from vlhmm.errors import ConfigError

    if args.run_folder is None or args.requests < 10:
        raise ConfigError("serving needs --run RUN and at least 10 --requests")
    row = bench_serving(args.run_folder, args.requests)
    written = json.dumps(row, indent=2) + "\n"
    sys.stdout.write(written)
    if args.out:
        write_atomically(args.out, written.encode())
    return 0 if not row["refused"] and row["largest_difference_nats"] < 1e-4 else 1


def check_options(args: argparse.Namespace) -> None:
    """Let what could only fail after minutes of measuring fail now."""
    from benchmarks.growth import require_plots
    from benchmarks.run import chosen_parts
    from vlhmm.errors import ConfigError

    if args.device == "cuda":
        setup(args)  # says so if there is none
        raise ConfigError("python -m benchmarks measures this machine's processor; take --device cpu")
    if args.run_folder and args.subject is None:
        raise ConfigError(f"--run belongs to queries: python -m benchmarks queries --run {args.run_folder}")
    if args.subject is not None and (args.only or args.plot or args.markdown):
        raise ConfigError(f"python -m benchmarks {args.subject} takes no --only, --plot or --markdown; it has a few figures")
    if args.plot:
        require_plots()
        if "growth" not in chosen_parts(args.only):
            raise ConfigError("--plot draws the part growth, which --only leaves out; add it, or drop --plot")
    chosen_parts(args.only)
    for name in (args.out, args.markdown, args.plot):
        if name and not Path(name).absolute().parent.is_dir():
            raise ConfigError(f"{name} cannot be written: {Path(name).absolute().parent} is no folder")


def run_all(args: argparse.Namespace, sizes: Any) -> int:
    from benchmarks.growth import plot
    from benchmarks.report import markdown
    from benchmarks.run import run_bench
    from vlhmm.data.atomic_io import write_atomically

    note = log_to(args.quiet)
    row = run_bench(
        sizes,
        corpus=args.corpus,
        data_dir=args.data_dir,
        only=args.only,
        threads=args.threads,
        memory=args.memory,
        seed=args.seed,
        note=note,
    )
    tables, line = markdown(row), json.dumps(row)
    if args.out:
        write_atomically(args.out, f"{line}\n".encode())
    if args.markdown:
        write_atomically(args.markdown, tables.encode())
    if args.plot:
        points = row["figures"]["growth"].get("points")
        if points:
            plot(points, sizes, args.plot)
        else:
            note(f"{args.plot} was not drawn: the part growth was not measured")
    print(line if args.format == "json" else tables, end="\n" if args.format == "json" else "")
    return 1 if row["incomplete"] else 0


def run_queries(args: argparse.Namespace, sizes: Any) -> int:
    from benchmarks import machine
    from benchmarks.query_speed import bench_queries
    from vlhmm.data.atomic_io import write_atomically
    from vlhmm.errors import ConfigError

    note, began = log_to(args.quiet), time.monotonic()
    if args.run_folder:
        import vlhmm

        model, what = vlhmm.load_any(args.run_folder, memory=args.memory), {"run": args.run_folder}
        if not hasattr(model, "tables"):
            raise ConfigError(f"{args.run_folder} is a baseline; queries need an HMM, made by vlhmm train")
    else:
        from benchmarks.queries import untrained_model

        model, what = untrained_model(sizes, args.corpus, args.data_dir, args.memory, args.seed, note)
        note(f"an untrained model with the vocabulary of {what['corpus']}: it costs what a trained one does")
    found = bench_queries(model, seed=args.seed)
    row = {
        **found, **what, "num_states": model.distributions.num_states, "num_blocks": model.tables.num_blocks,
        "vocabulary": len(model.vocabulary), "seconds": round(time.monotonic() - began, 1),
        "machine": machine.describe(args.threads), "commit": machine.commit(),
    }  # fmt: skip
    if args.out:
        write_atomically(args.out, f"{json.dumps(row)}\n".encode())
    if args.format == "json":
        print(json.dumps(row))
    else:
        print(
            f"{row['num_states']:,} states, {row['vocabulary']:,} words\n"
            f"  next word               {found['next_ms']:.1f} ms\n"
            f"  sampling                {found['sample_tokens_per_s']:,.0f} tokens/s\n"
            f"  infilling a word        {found['infill_1_s']:.2f} s\n"
            f"  infilling five words    {found['infill_5_s']:.2f} s"
        )
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_program(lambda: build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

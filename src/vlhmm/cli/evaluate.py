"""`vlhmm evaluate`: perplexity, with every count it depends on."""

from __future__ import annotations

import argparse
from typing import Any

from vlhmm.cli.common import DATA_DIR, add_format, add_machine_options, load_run_texts, log_to, setup, token_progress
from vlhmm.cli.numbers import count
from vlhmm.config import to_json
from vlhmm.limits import counted

DESCRIPTION = "Evaluate the perplexity of texts under a trained model."
EPILOG = """\
FILE is a text file with one sentence per line, - for standard input, a folder written by vlhmm prepare, or a corpus
name (ptb means its valid and test splits, ptb:test one of them). Words beyond the model's vocabulary are scored as
<unk> and counted as OOV.

examples:
  vlhmm evaluate runs/ptb ptb.test.txt
  vlhmm evaluate runs/ptb ptb --context both --format json
  vlhmm evaluate runs/kn other.txt.gz                        baselines are evaluated by the same function
  vlhmm evaluate kenlm.arpa.gz ptb.test.txt                  any n-gram model in ARPA format

Perplexity is exp(-log p / tokens); tokens are the words plus one <eos> per line. The context rule says whether the
model is reset at each line (reset) or continues from the previous one (carry, in --streams parallel streams). The
default is the rule of training.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("run_folder", metavar="RUN", help="run folder of vlhmm train, baseline or mix, or an ARPA file")
    parser.add_argument("files", metavar="FILE", nargs="+", help="a text file, - for standard input, or a corpus name")
    parser.add_argument(
        "--context", choices=("reset", "carry", "both"), help="context rule (default: that of training)"
    )
    parser.add_argument(
        "--streams", type=count(1), default=16, metavar="N", help="parallel streams under carry (default: 16)"
    )
    parser.add_argument("--data-dir", metavar="DIR", help=DATA_DIR)
    add_format(parser, "text", "json", "jsonl")
    add_machine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate every text; return 0."""
    device = setup(args)
    import vlhmm
    from vlhmm.evaluation.perplexity import evaluate

    model = vlhmm.load_any(args.run_folder, memory=args.memory, device=device)
    rule: Any = args.context or model.rule
    reports = []
    for name, text in load_run_texts(model, args.files, args.data_dir):
        if rule != "reset" and text.num_sentences < args.streams:
            log_to(args.quiet)(
                f"{name}: {text.num_sentences} lines in {args.streams} streams, cut mid-line; lower --streams"
            )
        for context in ("reset", "carry") if rule == "both" else (rule,):
            with token_progress(args.quiet, name) as progress:
                report = evaluate(model, text, context, args.streams, progress=progress)
            reports.append({"file": name, "run": args.run_folder, **report.to_dict()})
            if args.format == "text":
                print(described(reports[-1]))
            elif args.format == "jsonl":
                print(to_json(reports[-1]), flush=True)
    if args.format == "json":
        print(to_json(reports[0] if len(reports) == 1 else reports))
    return 0


def described(r: dict[str, Any]) -> str:
    """Format a report as text."""
    streams = f" over {r['streams']} streams" if r["streams"] else ""
    per_byte = f"{r['bits_per_byte']:.4f} bits per byte, " if r["bits_per_byte"] == r["bits_per_byte"] else ""  # NaN: not known
    return (
        f"{r['file']}  perplexity {r['perplexity']:.2f}  (context {r['context']}{streams})\n"
        f"  {counted(r['sentences'], 'sentence')}, {counted(r['words'], 'word')}, {counted(r['tokens'], 'token')} with <eos>; "
        f"{r['oov']:,} OOV, {r['literal_unk']:,} literal <unk>; vocabulary {r['vocabulary_size']:,}\n"
        f"  log-probability {r['log_likelihood']:.1f} nats, {r['bits_per_token']:.4f} bits per token, "
        f"{per_byte}perplexity without OOV {r['perplexity_without_oov']:.2f}"
    )

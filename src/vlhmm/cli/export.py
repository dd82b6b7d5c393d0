"""`vlhmm export`: write the model's matrices for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlhmm.cli.common import log_to
from vlhmm.cli.options import ResultWriter, add_query_options, load_model

DESCRIPTION = "Write the model's dense matrices for other programs."
EPILOG = """\
The matrices are start (S,), transition (S, S) and emission (S, V). They are large (over 5 GB at 2^15 states), so their
size is printed first, and they are written a few rows at a time. S is the number of states that can be entered. With
allocation=tokens the model has further state ids, which pad the smaller blocks; state_ids has the id of each exported
state.

  npz, safetensors   float32 probabilities named start, transition, emission (the default, by OUT's suffix)
  ctrl-g             a folder for Ctrl-G's HMM class: alpha_exp, beta, gamma, config.json; <eos> has its own absorbing
                     state, the last one, because Ctrl-G pads texts with <eos>
  hmmlearn           .npz with startprob_, transmat_, emissionprob_ in float64, for small models

examples:
  vlhmm export runs/mine mine.safetensors
  vlhmm export runs/mine ctrlg-mine --kind ctrl-g
  vlhmm export runs/small small.npz --kind hmmlearn
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_query_options(parser, "text", "json")
    parser.add_argument("out", metavar="OUT", help="file to write, or folder for ctrl-g")
    parser.add_argument("--kind", choices=("npz", "safetensors", "ctrl-g", "hmmlearn"), help="format (default: by OUT's suffix)")


def run(args: argparse.Namespace) -> int:
    """Write the matrices; return 0."""
    from vlhmm.analysis.export import export, export_bytes, kind_of
    from vlhmm.data.user_text import gibibytes

    kind = args.kind or kind_of(Path(args.out))
    model = load_model(args)
    log = log_to(args.quiet)
    size = export_bytes(model, kind)
    log(f"{args.out} will take {gibibytes(size)}" + (": the dense matrices are large" if size > 1 << 30 else ""))
    if model.rule == "reset" and args.kind != "ctrl-g":
        log("the model restarts after every <eos>; the matrices describe one sentence")
    written = export(model, args.out, kind)
    record = {"out": str(written.path), "kind": written.kind, "bytes": written.num_bytes, "rule": model.rule}
    ResultWriter(args.format, single=True)(record, f"{written.path}\t{written.kind}\t{written.num_bytes:,} bytes")
    return 0

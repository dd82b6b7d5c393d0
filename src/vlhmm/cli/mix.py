"""`vlhmm mix`: linear interpolation of trained models, saved as a run of its own."""

from __future__ import annotations

import argparse
from typing import Any

from vlhmm.cli.common import (
    DATA_DIR,
    add_format,
    add_machine_options,
    is_corpus,
    load_run_texts,
    log_to,
    setup,
    token_progress,
)
from vlhmm.config import to_json
from vlhmm.errors import CheckpointError, ConfigError

DESCRIPTION = "Interpolate trained models linearly, and save the mixture as a run of its own."
EPILOG = """\
RUN is a run folder of vlhmm train, vlhmm baseline or vlhmm mix; a mixture is replaced by its components. All models
must have the same vocabulary.

examples:
  vlhmm baseline kn train.txt --valid valid.txt --out runs/kn
  vlhmm mix runs/mine runs/kn --valid valid.txt --out runs/mixed
  vlhmm evaluate runs/mixed test.txt
  vlhmm mix runs/mine runs/kn --weights 0.5,0.5 --out runs/half          fixed weights, no validation text

The mixture's probability of a token is p(x_t | x_<t) = sum_i w_i p_i(x_t | x_<t). EM finds the weights that maximize
the probability of the validation text. Report perplexity on another text.
evaluate, score, next and sample answer exactly for a mixture. infill, decode, inspect, surprisal, information, verify
and export need hidden states: run them on the HMM in RUN/components, which is a complete run folder.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folder of vlhmm train, baseline or mix")
    parser.add_argument(
        "--valid", metavar="FILE", help="text to fit the weights to: a file, -, or a corpus name (its valid split)"
    )
    parser.add_argument("--out", metavar="RUN", required=True, help="folder of the mixture")
    parser.add_argument("--weights", metavar="W,W,...", help="fixed weights instead of EM")
    parser.add_argument("--context", choices=("reset", "carry"), help="context rule (default: that of the models)")
    parser.add_argument("--data-dir", metavar="DIR", help=DATA_DIR)
    add_format(parser)
    add_machine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Fit and save the mixture; return 0."""
    from pathlib import Path

    if not args.valid and not args.weights:
        raise ConfigError("--valid is missing: the text that the weights are fitted to; or give --weights")
    given = weights_of(args.weights) if args.weights else None
    device = setup(args)
    from vlhmm.evaluation.mixture import check_target

    check_target(Path(args.out))
    parts = opened(args.runs, args.memory, device, Path(args.out))
    rule = args.context or common_rule(parts, log_to(args.quiet))
    text, name = None, args.valid
    if args.valid:
        wanted = f"{args.valid}:valid" if is_corpus(args.valid) else args.valid
        ((name, text),) = load_run_texts(parts[0].model, [wanted], args.data_dir)
    with token_progress(args.quiet, "scoring") as progress:
        summary = mix_runs(parts, text, name, args.out, rule, given, progress)
    print(to_json(summary) if args.format == "json" else "\n".join(described(summary)))
    return 0


def weights_of(text: str) -> list[float]:
    """Return numbers from 0.5,0.5."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text!r}: expected numbers with commas between them, e.g. 0.5,0.5") from None


class Part:
    """A model to mix, and its folder."""

    def __init__(self, name: str, folder: Any, model: Any) -> None:
        self.name, self.folder, self.model = name, folder, model


def opened(runs: list[str], memory: int | None, device: str, out: Any) -> list[Part]:
    """Return the models of the runs; those of a mixture one by one."""
    from pathlib import Path

    import vlhmm
    from vlhmm.data import Vocabulary
    from vlhmm.data.checked import kind_of_run
    from vlhmm.evaluation.mixture import KIND, check_vocabularies, read_mixture

    folders: list[tuple[str, Path]] = []
    for run_folder in runs:
        if not Path(run_folder).exists():
            raise CheckpointError(f"{run_folder} does not exist; expected a run of vlhmm train or vlhmm baseline")
        if Path(run_folder).is_file():
            raise CheckpointError(f"{run_folder} is a file; vlhmm mix keeps copies of run folders, expected one")
        if kind_of_run(run_folder) == KIND:
            folders += [(part.source, part.folder) for part in read_mixture(run_folder).components]
        else:
            folders.append((run_folder, Path(run_folder)))
    if any(folder.resolve().is_relative_to(Path(out).resolve()) for _, folder in folders):
        raise ConfigError(f"--out {out} holds a model that is to be mixed; choose another --out")
    paths = [folder / "vocabulary.txt" for _, folder in folders]
    check_vocabularies([Vocabulary.read(path) for path in paths], [name for name, _ in folders])
    return [Part(name, folder, vlhmm.load_any(folder, memory=memory, device=device)) for name, folder in folders]


def common_rule(parts: list[Part], log: Any) -> Any:
    """Return the models' context rule; if they differ, reset, with a message. An n-gram model has no rule of its own."""
    rules = {part.model.rule for part in parts if not hasattr(part.model, "levels")}
    if len(rules) > 1:
        log("the models were trained under different context rules; the mixture restarts at every line (--context)")
    return rules.pop() if len(rules) == 1 else "reset"


def mix_runs(
    parts: list[Part], text: Any, text_name: str | None, out: Any, rule: Any, weights: Any = None, progress: Any = None
) -> dict[str, Any]:
    """Fit the weights unless they are given, save the mixture, and say what came of it."""
    from vlhmm.evaluation.mixture import Mixture, component_log_probs, fit_weights, mixture_log_probs, write_mixture
    from vlhmm.evaluation.perplexity import perplexity

    models = [part.model for part in parts]
    alone: list[float | None] = [None] * len(parts)
    fitted, updates = None, None
    if text is not None:
        log_probs = component_log_probs(models, text, rule, progress=progress)
        alone = [perplexity(float(row.sum()), text.num_tokens) for row in log_probs]
        if weights is None:
            found = fit_weights(log_probs)
            weights, updates = found.weights, len(found.log_likelihoods) - 1
    weights = Mixture(models, weights, rule).weights  # normalized, and checked
    if text is not None:
        fitted = perplexity(float(mixture_log_probs(log_probs, weights).sum()), text.num_tokens)
    about = {"valid": {"text": text_name, "perplexity": fitted, "em_updates": updates}}
    write_mixture(out, [part.folder for part in parts], weights, rule, about, [part.name for part in parts])
    return {
        "run": str(out),
        "context": rule,
        "valid": text_name,
        "perplexity": fitted,
        "tokens": None if text is None else text.num_tokens,
        "components": [
            {"run": part.name, "weight": float(w), "perplexity": p}
            for part, w, p in zip(parts, weights, alone, strict=True)
        ],
    }


def described(summary: dict[str, Any]) -> list[str]:
    """Return the summary as text."""
    parts = summary["components"]
    width = max(len("mixture"), *(len(part["run"]) for part in parts))
    shown = [f"{'run':<{width}}  weight  perplexity"]
    for part in parts:
        value = "" if part["perplexity"] is None else f"{part['perplexity']:.2f}"
        shown.append(f"{part['run']:<{width}}  {part['weight']:>6.3f}  {value:>10}")
    if summary["perplexity"] is None:
        return [*shown, f"saved in {summary['run']}"]
    shown.append(f"{'mixture':<{width}}  {1:>6.3f}  {summary['perplexity']:>10.2f}")
    return [
        *shown,
        f"on {summary['valid']} ({summary['tokens']:,} tokens, context {summary['context']}), to which the weights were "
        f"fitted; saved in {summary['run']}",
    ]

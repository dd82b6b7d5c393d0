"""`vlhmm`: one program, a module a verb. Data goes to standard output, everything else to standard error."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from vlhmm.config import unknown
from vlhmm.errors import ConfigError, VlhmmError
from vlhmm.limits import shortened
from vlhmm.malloc import keep_freed_memory

VERBS = {  # in the order of --help; a verb's module is imported when it is needed
    "demo": "train and show a model on the embedded corpus, in minutes",
    "train": "train a model on any whitespace-tokenized text",
    "evaluate": "perplexity of texts, with every count beside it",
    "prepare": "write texts as memory-mapped ids, for texts larger than memory",
    "cluster": "sort words into blocks (Brown clusters, wcluster's format)",
    "inspect": "what a state, a word or a block stands for",
    "score": "log-probability of sentences or tokens, streaming",
    "next": "the exact distribution of the next word",
    "sample": "exact samples, with or without a prompt",
    "infill": "fill gaps given both sides, under hard constraints",
    "decode": "hidden states of a text: best path or posteriors",
    "surprisal": "the words of a text least expected given both sides",
    "information": "entropy rate, probability of phrases, divergence of two models",
    "verify": "prove exactness on your own model",
    "manifest": "check or renew the checksums of a run folder",
    "export": "the model's matrices for other programs",
    "distill": "train an HMM on samples of a language model",
    "steer": "lead a language model through hard constraints",
    "mix": "interpolate trained models, weights by EM on a validation text",
    "serve": "the model over HTTP: OpenAI's API, exact",
    "explore": "look inside a model in the browser",
    "baseline": "Kneser-Ney, feed-forward and LSTM beside it",
    "completion": "completion of verbs and options for bash, zsh or tcsh",
}

EPILOG = """\
first steps:
  vlhmm demo                                                  minutes, on two cores, nothing to download
  vlhmm train train.txt --valid valid.txt --out runs/mine      your own text
  vlhmm evaluate runs/mine test.txt
  vlhmm infill runs/mine "he [MASK] to the [MASK:1-4] ."

vlhmm VERB --help teaches a verb with examples.
"""


class Parser(argparse.ArgumentParser):
    """A wrong argument gets one line that tells where to look, as every other error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def available() -> dict[str, str]:
    """The verbs whose modules are installed."""
    return {verb: text for verb, text in VERBS.items() if importlib.util.find_spec(f"vlhmm.cli.{verb}")}


def build_parser(only: str | None = None, everything: bool = False) -> argparse.ArgumentParser:
    """The parser of one verb with the others by name, or of every verb with all its options."""
    parser = Parser(
        prog="vlhmm",
        description="Very large hidden Markov language models: train, score and query, exactly.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vlhmm {version()}")
    subparsers = parser.add_subparsers(metavar="VERB", title="verbs", dest="verb", required=True)
    for verb, text in available().items():
        if everything or verb == only:
            importlib.import_module(f"vlhmm.cli.{verb}").add_parser(subparsers)
        else:
            subparsers.add_parser(verb, help=text, add_help=False)
    return parser


def version() -> str:
    from importlib.metadata import version as installed

    return installed("vlhmm")


def prepare_process() -> None:
    """Settings of this process that must stand before torch is loaded; a library import never makes them.

    Idle OpenMP threads spin for some ten microseconds, so that the many small products of a step do not each wake a
    thread, and then sleep instead of spinning against the kernels' own. Freed memory is kept: pages fresh from the
    system cost more than the arithmetic done in them.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    keep_freed_memory()


def parse(arguments: list[str], verb: str | None) -> argparse.Namespace:
    """The arguments of that verb; what it does not know is refused."""
    for place, argument in enumerate(arguments, start=1):
        if "\0" in argument:
            raise ConfigError(f"argument {place} holds a NUL character, which no path and no text has; remove it")
        if argument.startswith("-") and argument.endswith("=--"):  # argparse would read an empty list
            raise ConfigError(f"{shortened(argument)}: expected a value; see vlhmm {verb or ''} --help")
        if not argument.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise ConfigError(f"argument {place} is not UTF-8; convert it, or rename the file")
    if verb is not None and verb not in available():
        raise unknown("verb", verb, list(available()))
    args, left = build_parser(verb).parse_known_args(arguments)
    if left:
        raise ConfigError(f"{verb} does not take {shortened(' '.join(left))}; see vlhmm {verb} --help")
    return args


def out_of_memory() -> int:
    print("vlhmm: not enough memory; take fewer states, smaller batches or a smaller --memory", file=sys.stderr)
    return 1


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    verb = next((word for word in arguments if not word.startswith("-")), None)
    return run_program(lambda: parse(arguments, verb))


def run_program(parse_arguments: Callable[[], argparse.Namespace]) -> int:
    """Parse the arguments, call their `run`, and turn errors into one line on standard error and an exit code."""
    prepare_process()
    logging.basicConfig(format="vlhmm: %(message)s", level=logging.WARNING)
    try:
        args = parse_arguments()
        code = args.run(args)
        sys.stdout.flush()
        return code
    except VlhmmError as error:
        rank = os.environ.get("RANK", "0") if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "0"
        if rank == "0" or not isinstance(error, ConfigError):  # of torchrun's processes, all have the same settings
            where = "" if rank == "0" else f"rank {rank}: "
            print(f"vlhmm: {where}{' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("vlhmm: interrupted", file=sys.stderr)
        return 130
    except MemoryError:
        return out_of_memory()
    except RecursionError:
        print("vlhmm: an argument is nested too deeply; write it flatter", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if "can't allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        return out_of_memory()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"vlhmm: {where}{error.strerror or error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

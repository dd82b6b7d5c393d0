"""`vlhmm`: one program with a module per verb. Data goes to standard output, everything else to standard error."""

from __future__ import annotations

import argparse
import errno
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
    "demo": "train, evaluate and query a model of the built-in corpus, in minutes",
    "train": "train a model on a text",
    "evaluate": "perplexity of texts, with all counts",
    "prepare": "convert texts to memory-mapped ids, for texts larger than memory",
    "cluster": "cluster words into blocks (Brown clusters, wcluster's format)",
    "inspect": "words, neighbours and usage of a state, a word or a block",
    "score": "log-probability of sentences or tokens",
    "next": "exact distribution of the next word",
    "sample": "exact samples, with or without a prompt",
    "infill": "fill gaps given both sides, under hard constraints",
    "decode": "hidden states of a text: best paths or posteriors",
    "surprisal": "least expected words of a text, given both sides",
    "information": "entropy rate, phrase probabilities, divergence of two models",
    "verify": "check that the answers of a trained model are exact",
    "manifest": "check or update the checksums of a run folder",
    "export": "write the model's matrices for other programs",
    "distill": "train an HMM on samples of a language model",
    "steer": "generate text with a language model under hard constraints",
    "mix": "interpolate trained models, with weights fitted by EM",
    "serve": "serve a model over HTTP with OpenAI's API",
    "explore": "explore a model in the browser",
    "baseline": "train a Kneser-Ney, feed-forward or LSTM baseline",
    "completion": "print a completion script for bash, zsh or tcsh",
}

EPILOG = """\
first steps:
  vlhmm demo                                                   takes minutes on two cores, downloads nothing
  vlhmm train train.txt --valid valid.txt --out runs/mine      train on your own text
  vlhmm evaluate runs/mine test.txt
  vlhmm infill runs/mine "he [MASK] to the [MASK:1-4] ."

vlhmm VERB --help describes a verb, with examples.
"""


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def available() -> dict[str, str]:
    """Return the verbs whose modules are installed."""
    return {verb: text for verb, text in VERBS.items() if importlib.util.find_spec(f"vlhmm.cli.{verb}")}


def build_parser(only: str | None = None, everything: bool = False) -> argparse.ArgumentParser:
    """Build the parser of one verb with the others by name only, or of every verb with all its options."""
    keep_layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="vlhmm",
        description="Very large hidden Markov language models: train, score and query, exactly.",
        epilog=EPILOG,
        formatter_class=keep_layout,
    )
    parser.add_argument("--version", action="version", version=f"vlhmm {version()}")
    subparsers = parser.add_subparsers(metavar="VERB", title="verbs", dest="verb", required=True)
    for verb, text in available().items():
        if everything or verb == only:
            module = importlib.import_module(f"vlhmm.cli.{verb}")
            verb_parser = subparsers.add_parser(
                verb, help=text, description=module.DESCRIPTION, epilog=module.EPILOG, formatter_class=keep_layout
            )
            module.add_options(verb_parser)
            verb_parser.set_defaults(run=module.run)
        else:
            subparsers.add_parser(verb, help=text, add_help=False)
    return parser


def version() -> str:
    """Return the installed version."""
    from importlib.metadata import version as installed

    return installed("vlhmm")


def prepare_process() -> None:
    """Set what must be set before torch is loaded. Importing the library never does this.

    Idle OpenMP threads spin for about ten microseconds, so that the many small products of a step need not wake a
    thread each, and then sleep, so that they do not compete with the compiled kernels' threads. Freed memory is kept:
    fresh pages from the system cost more than the arithmetic done in them.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    keep_freed_memory()


def parse(arguments: list[str], verb: str | None) -> argparse.Namespace:
    """Parse the arguments of a verb; refuse what it does not know."""
    for place, argument in enumerate(arguments, start=1):
        if "\0" in argument:
            raise ConfigError(f"argument {place} contains a NUL character; remove it")
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
    """Report that memory is exhausted, and return the exit code."""
    print("vlhmm: not enough memory; use fewer states, smaller batches or a smaller --memory", file=sys.stderr)
    return 1


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    verb = next((word for word in arguments if not word.startswith("-")), None)
    return run_program(lambda: parse(arguments, verb))


def run_program(parse_arguments: Callable[[], argparse.Namespace]) -> int:
    """Parse the arguments, call their `run`, and turn errors into one line on standard error and an exit code."""
    if sys.stderr is None:  # closed; print(file=None) would write to standard output
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:  # the next file opened would get its number
        print("vlhmm: standard output is closed; redirect it, to /dev/null if the answer is not wanted", file=sys.stderr)
        return 2
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
    except BrokenPipeError:  # the reader closed the pipe
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
        if error.errno == errno.ENAMETOOLONG:
            print(f"vlhmm: {shortened(str(error.filename))}: the name is too long; choose a shorter one", file=sys.stderr)
            return 2
        print(f"vlhmm: {where}{error.strerror or error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

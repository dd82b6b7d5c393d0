"""`vlhmm completion`: the script with which a shell completes verbs and options."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from vlhmm.cli.common import verb_parser
from vlhmm.errors import ConfigError

EPILOG = """\
examples:
  eval "$(vlhmm completion bash)"                                    this shell
  vlhmm completion bash >> ~/.local/share/bash-completion/completions/vlhmm
  vlhmm completion zsh > ~/.zfunc/_vlhmm                             with ~/.zfunc in fpath
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb, added to `subparsers`."""
    parser = verb_parser(
        subparsers,
        "completion",
        "completion of verbs and options for bash, zsh or tcsh",
        "Print a script with which the shell completes vlhmm's verbs and options. Needs the extra `completion`.",
        EPILOG,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell that will read it")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """0 when the script is printed."""
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise ConfigError("completion needs the package shtab; pip install 'vlhmm[completion]'") from None
    from vlhmm.cli.main import build_parser

    print(shtab.complete(build_parser(everything=True), args.shell))
    return 0

"""`vlhmm completion`: print a shell's completion script."""

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
    """Add the parser of this verb."""
    parser = verb_parser(
        subparsers,
        "completion",
        "print a completion script for bash, zsh or tcsh",
        "Print a script that lets the shell complete verbs and options. It needs the extra `completion`.",
        EPILOG,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="your shell")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the script; return 0."""
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise ConfigError("completion needs the package shtab; pip install 'vlhmm[completion]'") from None
    from vlhmm.cli.main import build_parser

    print(shtab.complete(build_parser(everything=True), args.shell))
    return 0

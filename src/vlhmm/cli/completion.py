"""`vlhmm completion`: print a shell's completion script."""

from __future__ import annotations

import argparse
import importlib

from vlhmm.errors import ConfigError

DESCRIPTION = "Print a script that lets the shell complete verbs and options. It needs the extra `completion`."
EPILOG = """\
examples:
  eval "$(vlhmm completion bash)"                                    this shell
  vlhmm completion bash >> ~/.local/share/bash-completion/completions/vlhmm
  vlhmm completion zsh > ~/.zfunc/_vlhmm                             with ~/.zfunc in fpath
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="your shell")


def run(args: argparse.Namespace) -> int:
    """Print the script; return 0."""
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise ConfigError("completion needs the package shtab; pip install 'vlhmm[completion]'") from None
    from vlhmm.cli.main import build_parser

    print(shtab.complete(build_parser(everything=True), args.shell))
    return 0

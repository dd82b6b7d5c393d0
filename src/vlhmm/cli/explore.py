"""`vlhmm explore`: run the server and open its page in a browser, or write a page that needs no server."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from tempfile import TemporaryFile

from vlhmm.cli.common import log_to, token_progress
from vlhmm.cli.numbers import count
from vlhmm.cli.serve import add_server_options, make_server, serve
from vlhmm.errors import ConfigError

DESCRIPTION = "Explore a trained model in a browser."
EPILOG = """\
examples:
  vlhmm explore runs/mine                        opens http://127.0.0.1:8000/ in a browser
  vlhmm explore runs/mine --no-browser --port 0
  vlhmm explore runs/mine --export site          a folder with a page of states and blocks, for any web server
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_server_options(parser)
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--export", metavar="DIR", help="write a page that works without a server, and exit")
    parser.add_argument(
        "--top-states", type=count(1), default=1000, metavar="N", help="with --export: number of states, the most used ones (default: 1000)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page or run the server; return 0."""
    if args.export:
        check_writable(Path(args.export))
        server = make_server(args)
        from vlhmm.queries.left_to_right import has_hidden_states, kind_of
        from vlhmm.server.export import export_page

        if not has_hidden_states(server.model):
            kind = kind_of(server.model)
            raise ConfigError(f"{args.run_folder} is a {kind}, which has no states to explore; give a run of vlhmm train")
        with token_progress(args.quiet, "states and blocks") as progress:
            pages = export_page(server, args.export, args.top_states, progress)
        log_to(args.quiet)(f"{pages:,} files in {args.export}; open index.html, or put the folder on any web server")
        return 0

    def open_page(address: str) -> None:
        print(f"{address}/", flush=True)
        if not args.no_browser and sys.stdout.isatty():
            import webbrowser

            threading.Timer(1.0, webbrowser.open, [f"{address}/"]).start()

    return serve(args, open_page)


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, before the minutes that its pages take."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}; choose another --export") from None

"""`vlhmm serve`: serve one model over HTTP."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlhmm.cli.common import add_machine_options, log_to, setup
from vlhmm.cli.numbers import count, real
from vlhmm.errors import ConfigError
from vlhmm.limits import shortened

DESCRIPTION = "Serve a trained model over HTTP."
EPILOG = """\
The API is OpenAI's completions API with exact answers. OpenAI clients and lm-evaluation-harness work with it.
docs/serving.md lists all routes, GET /openapi.json is their machine-readable description, and / is a web page.

examples:
  vlhmm serve runs/mine
  vlhmm serve runs/mine --port 9000 --api-key "$KEY"
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "the company", "max_tokens": 10}'

The server listens on 127.0.0.1 only. With --host 0.0.0.0, every machine that can reach this one can use it: set
--api-key, and put a TLS proxy in front.
"""

_BACKLOG = 512


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    add_server_options(parser)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add RUN, the address and the limits."""
    parser.add_argument("run_folder", metavar="RUN", help="run folder of vlhmm train, baseline or mix")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1, this machine only)")
    parser.add_argument(
        "--port", type=count(0, 65_535), default=8000, metavar="N", help="port, 0 for any free one (default: 8000)"
    )
    parser.add_argument("--name", help="name of the model for clients (default: that of the folder)")
    parser.add_argument(
        "--api-key", metavar="KEY", help="key that clients must send (default: $VLHMM_API_KEY, else none)"
    )
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-concurrent", type=count(1, 100_000), default=64, metavar="N", help="concurrent requests (default: 64)"
    )
    group.add_argument("--max-seconds", type=real(0, 1e8), default=60.0, metavar="S", help="seconds per request (default: 60)")
    group.add_argument(
        "--max-prompt-tokens", type=count(1), default=65_536, metavar="N", help="tokens per prompt (default: 65,536)"
    )
    group.add_argument(
        "--grace", type=count(0, 86_400), default=10, metavar="S", help="seconds to finish requests after SIGTERM (default: 10)"
    )
    add_machine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until asked to stop; return 0."""
    return serve(args, None)


def check_installed() -> None:
    """Refuse where the extra is missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; pip install 'vlhmm[serve]'")


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse settings that do not fit."""
    if args.max_seconds == 0:
        raise ConfigError("--max-seconds 0: nothing is answered in no time; expected more than 0")
    name, key = "--api-key", args.api_key
    if key is None:
        name, key = "VLHMM_API_KEY", os.environ.get("VLHMM_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
        got = "an empty key" if not key.strip() else "characters that no HTTP header has"
        raise ConfigError(f"{name}: got {got}, expected printable ASCII; leave it out to ask for none")
    args.api_key = key and key.strip()  # as a header is read
    if args.name is not None and (not args.name.isprintable() or not args.name.strip()):
        raise ConfigError(f"--name {shortened(args.name)}: expected printable characters")


def make_server(args: argparse.Namespace, for_people: bool = False) -> Any:
    """Load the model and build the application; `for_people`: what the page shows is prepared from the start."""
    check_installed()
    check_arguments(args)
    device = setup(args)
    import vlhmm
    from vlhmm.server.app import Server
    from vlhmm.server.limits import Limits

    log = log_to(args.quiet)
    log(f"loading {args.run_folder}")
    model = vlhmm.load_any(args.run_folder, memory=args.memory, device=device)
    tokens = args.max_prompt_tokens
    limits = Limits(
        concurrent=args.max_concurrent,
        seconds=args.max_seconds,
        prompt_tokens=tokens,
        body_bytes=max(Limits().body_bytes, 16 * tokens),
        alternatives=max(Limits().alternatives, 2 * tokens),
    )
    name = args.name or Path(args.run_folder).resolve().name
    key = args.api_key
    loopback = args.host in ("127.0.0.1", "localhost", "::1")
    if not loopback:
        warning = "" if key else "; requests need no key, set --api-key"
        log(f"binding {args.host}: every machine that can reach this one can use the model{warning}")
    return Server(model, name, args.run_folder, limits, key, loopback, for_people)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address. This comes before loading the model, which may take a minute."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if not host:
            raise OSError("the address is empty")
        bound.bind((host, port))
    except (OSError, TypeError, UnicodeError) as error:  # the last two: no host has such a name
        bound.close()
        reason = error.strerror or str(error) if isinstance(error, OSError) else "no host has such a name"
        raise ConfigError(
            f"cannot bind {shortened(host)}, port {port}: {reason}; choose another --host, or another --port (0: a free one)"
        ) from None
    return bound


def serve(args: argparse.Namespace, ready: Callable[[str], None] | None) -> int:
    """Serve until SIGTERM or Ctrl-C; `ready` is called with the address."""
    check_installed()
    check_arguments(args)
    with bound_socket(args.host, args.port) as listening:
        return serve_on(listening, args, ready)


def serve_on(listening: socket.socket, args: argparse.Namespace, ready: Callable[[str], None] | None) -> int:
    """Load the model and serve it on a socket."""
    server = make_server(args, ready is not None)
    import uvicorn

    from vlhmm.server.connection import Connection

    listening.listen(_BACKLOG)  # from here on clients may connect: the address is printed next
    port = listening.getsockname()[1]
    host = f"[{args.host}]" if ":" in args.host else "127.0.0.1" if args.host == "0.0.0.0" else args.host
    address = f"http://{host}:{port}"
    logging.getLogger("vlhmm.server").setLevel(logging.INFO)
    config = uvicorn.Config(
        server.app,
        http=Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=args.grace,
        backlog=_BACKLOG,
        h11_max_incomplete_event_size=64 << 10,
    )
    program = uvicorn.Server(config)
    # The event loop is not to wait: it gets its turn soon while the model's thread runs Python, and garbage collection
    # does not walk through the model.
    sys.setswitchinterval(0.001)
    gc.collect()
    gc.freeze()

    def end(number: int, frame: object) -> None:
        program.should_exit = True

    # uvicorn ends gracefully on both, then raises the signal again for the handler it found
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    if not args.quiet:
        word = _example_word(server.model)
        body = json.dumps({"prompt": word, "max_tokens": 10, "seed": 1})
        key = "" if server.api_key is None else ' -H "Authorization: Bearer $VLHMM_API_KEY"'
        print(f"{server.name} at {address}  (Ctrl-C ends it)", file=sys.stderr)
        print(f"curl {address}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'", file=sys.stderr)
        sys.stderr.flush()
    if ready is not None:
        ready(address)
    program.run(sockets=[listening])
    return 0


def _example_word(model: Any) -> str:
    """Return a word of the vocabulary that needs no escapes: the most frequent one."""
    return next((word for word in model.vocabulary.words if word.isascii() and word.isalpha()), "")

"""`vlhmm inspect`: describe a state, a word, a block, or the whole model."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vlhmm.cli.common import add_format, add_machine_options, setup, terminal_bar
from vlhmm.cli.numbers import count
from vlhmm.errors import QueryError

DESCRIPTION = "Show the words, neighbours, usage and entropies of a state, a word or a block."
EPILOG = """\
examples:
  vlhmm inspect runs/ptb                            sizes, number of states in use, the most used states
  vlhmm inspect runs/ptb word bank                  the states that emit it, and typical neighbours in each
  vlhmm inspect runs/ptb state 4711 --top-k 20
  vlhmm inspect runs/ptb block 17 --format json
  vlhmm inspect runs/ptb word -- -lrb-              a word that begins with a dash

Usage is the stationary distribution of the chain: the share of tokens that the model would emit from a state in an
endless text of its own. Under the context rule reset, the chain restarts after every <eos>; usage, predecessors and
successors take this into account. Usage is computed once per model and stored in RUN/usage.safetensors. This takes a
second at 2^13 states and up to a minute at 2^15 (with 4.3 GB of memory; several minutes with less, see --memory).
Entropies are in nats.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("run_folder", metavar="RUN", help="run folder of vlhmm train")
    parser.add_argument(
        "kind", metavar="state|word|block", nargs="?", choices=("state", "word", "block"), help="what to inspect (default: the whole model)"
    )
    parser.add_argument("subject", metavar="N|W|M", nargs="?", help="number of a state, a word, or number of a block")
    parser.add_argument("--top-k", type=count(1), default=10, metavar="K", help="entries per list (default: 10)")
    add_format(parser)
    add_machine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Inspect the model, a state, a word or a block; return 0."""
    subject = asked_for(args)
    device = setup(args)
    import vlhmm
    from vlhmm.analysis import inspect as inspection
    from vlhmm.analysis.stationary import usage_of
    from vlhmm.queries.left_to_right import without_states

    model = vlhmm.load_any(args.run_folder, memory=args.memory, device=device)
    if not hasattr(model, "distributions"):
        raise QueryError(without_states(model, args.run_folder, "inspect"))
    check_subject(model, args.kind, subject, args.top_k, inspection)  # before the usage is found: that takes its time
    with usage_progress(args.quiet) as progress:
        usage = usage_of(model, args.run_folder, args.memory, progress)
    inspector = inspection.Inspector(model, usage)
    if args.kind is None:
        view, text = inspector.summary(args.top_k), summary_text
    else:
        view = getattr(inspector, args.kind)(subject, args.top_k)
        text = {"state": state_text, "word": word_text, "block": block_text}[args.kind]
    about = {"run": args.run_folder, "kind": args.kind or "model", "context": model.rule, "log_base": "e"}
    if args.kind is None:
        about |= made_with(args.run_folder)
    about |= {"usage_rounds": usage.rounds, "usage_change": usage.change}
    content = about | view.to_dict()
    print(json.dumps(content, ensure_ascii=False) if args.format == "json" else text(content))
    return 0


def asked_for(args: argparse.Namespace) -> Any:
    """Return the subject: a number for states and blocks, a word, or nothing."""
    from vlhmm.limits import digits, shortened

    if args.kind is None:
        return None
    wanted = "a word" if args.kind == "word" else "a number"
    if args.subject is None:
        example = "bank" if args.kind == "word" else "17"
        raise QueryError(f"{args.kind} takes {wanted}: vlhmm inspect {args.run_folder} {args.kind} {example}")
    if args.kind == "word":
        return args.subject
    found = digits(args.subject.removeprefix("-"))
    if found is None:
        raise QueryError(f"{args.kind} takes {wanted}, got {shortened(args.subject)}")
    return -found if args.subject.startswith("-") else found  # a negative number is refused with the range


def check_subject(model: Any, kind: str | None, subject: Any, top: int, inspection: Any) -> None:
    """Raise a QueryError if there is no such state, word or block."""
    inspection.check_top(top)
    if kind == "state":
        inspection.check_state(model.distributions.blocks, subject)
    elif kind == "block":
        inspection.check_block(model.distributions.blocks, subject)
    elif kind == "word":
        inspection.known_word(model.vocabulary, subject)


def made_with(run_folder: str) -> dict[str, Any]:
    """Return how the model was made, and its number of parameters."""
    from safetensors import safe_open

    from vlhmm.training.run_folder import RunFolder

    folder = RunFolder(run_folder)
    model = folder.config()[0].model
    with safe_open(folder.model_path, framework="pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    names = ("constraint", "transition", "parameterization")
    return {"parameters": parameters} | {name: getattr(model, name) for name in names}


@contextmanager
def usage_progress(quiet: bool) -> Iterator[Callable[[int, float], None] | None]:
    """Show a bar on a terminal, a line elsewhere, and nothing if the usage is stored already."""
    if quiet:
        yield None
        return
    from vlhmm.analysis.stationary import TOLERANCE

    note = "finding the usage of every state (once for a model)"
    if not sys.stderr.isatty():
        yield lambda rounds, change: print(note, file=sys.stderr, flush=True) if rounds == 1 else None
        return
    with terminal_bar("TaskProgressColumn", "TimeElapsedColumn") as bar:
        task = bar.add_task(note, total=-math.log(TOLERANCE), visible=False)

        def draw(rounds: int, change: float) -> None:
            # the change falls by about the same factor in every round
            bar.update(task, completed=-math.log(max(TOLERANCE, min(1.0, change))), visible=True)

        yield draw


# ---- text output


def summary_text(v: dict[str, Any]) -> str:
    """Return the whole model."""
    blocks = ""
    if v["num_blocks"]:
        even = v["num_blocks"] * v["states_per_block"] == v["num_states"]
        blocks = f" in {v['num_blocks']:,} blocks of {'' if even else 'up to '}{v['states_per_block']:,}"
    lines = [
        f"{v['run']}: {v['num_states']:,} states{blocks}, {v['vocabulary_size']:,} words, "
        f"{v['parameters']:,} parameters",
        f"{v['transition']} transitions, {v['parameterization']} parameters, constraint {v['constraint']}, "
        f"context {v['context']}",
        f"usage: as if {v['used_states']:,.1f} states were used equally; half of all tokens come from "
        f"{v['half_of_tokens']:,} states, nine tenths from {v['most_of_tokens']:,}{unsettled(v)}",
    ]
    return "\n".join(
        [*lines, *listed("most used states", v["states"]), *listed("blocks with most tokens", v["blocks"])]
    )


def state_text(v: dict[str, Any]) -> str:
    """Return a state."""
    where = f", slot {v['slot']} of block {v['block']}" if v["block"] is not None else ""
    of_block = f", {v['share_of_block']:.1%} of its block" if v["share_of_block"] is not None else ""
    lines = [
        f"state {v['state']}{where}",
        f"usage {v['usage']:.3g} of all tokens (rank {v['usage_rank']:,}){of_block}{unsettled(v)}",
        f"emits {v['num_words']:,} words, entropy {spread(v['entropy'])}",
        *listed("words", v["words"]),
        *around(v, "state"),
    ]
    return "\n".join(lines)


def word_text(v: dict[str, Any]) -> str:
    """Return a word."""
    block = f" of block {v['block']}" if v["block"] is not None else ""
    lines = [
        f"{v['word']}  {v['frequency']:.3g} of all tokens (rank {v['frequency_rank']:,}){unsettled(v)}",
        f"{v['num_states']:,} states{block} may emit it; p(state | word) has entropy {spread(v['entropy'])}",
        *listed("words before", v["previous_words"]),
        *listed("words after", v["next_words"]),
        "states it comes from",
    ]
    for state in v["states"]:
        lines.append(f"  {state['share']:.4f}  state {state['state']:<7} {' '.join(state['words'])}")
        before, after = ([entry["word"] for entry in state[side]] for side in ("previous_words", "next_words"))
        lines.append(f"          {' / '.join(before)}  [{v['word']}]  {' / '.join(after)}")
    return "\n".join(lines)


def block_text(v: dict[str, Any]) -> str:
    """Return a block."""
    lines = [
        f"block {v['block']}  {v['num_words']:,} words, {v['num_states']:,} states, "
        f"as if {v['used_states']:,.1f} of them were used equally",
        f"usage {v['usage']:.3g} of all tokens (rank {v['usage_rank']:,}){unsettled(v)}, "
        f"entropy of its words {spread(v['entropy'])}",
        *listed("words", v["words"]),
        *listed("its most used states", v["states"]),
        *around(v, "block"),
    ]
    return "\n".join(lines)


def around(v: dict[str, Any], kind: str) -> list[str]:
    """Return what comes before and after a state or block."""
    lines = []
    for side, title in (("previous", "before"), ("next", "after")):
        lines.append(f"{title} it: entropy of the {side} {kind} {spread(v[f'{side}_entropy'])}")
        for what in ("words", "states", "blocks"):
            lines += listed(f"{what} {title}", v[f"{side}_{what}"])
    return lines


def listed(title: str, entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return a titled list; words side by side, states and blocks a line each."""
    if not entries:
        return []
    if "word" in entries[0]:
        return [f"{title}: " + "  ".join(f"{entry['word']} {entry['probability']:.3f}" for entry in entries)]
    name = "state" if "state" in entries[0] else "block"
    rows = [f"  {e['probability']:.4f}  {name} {e[name]:<7} {' '.join(e['words'])}" for e in entries]
    return [title, *rows]


def spread(entropy: float) -> str:
    """Return an entropy, and how many equally likely things have it."""
    return f"{entropy:.2f} nats (as {math.exp(entropy):,.1f} equally likely)"


def unsettled(v: dict[str, Any]) -> str:
    """Return a warning where the usage is not yet stationary."""
    from vlhmm.analysis.stationary import TOLERANCE

    if v["usage_change"] < TOLERANCE:
        return ""
    return f" (still changing by {v['usage_change']:.1g} after {v['usage_rounds']} rounds)"

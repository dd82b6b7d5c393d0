"""Fuzzing, in process: corrupted files, arguments, texts and the parsers' inputs, all drawn from one seed.

    python -m benchmarks.fuzz --cases 100000 --seed 0 --record benchmarks/results/fuzz.json

A case passes if it is answered, or refused with a `VlhmmError` (on the command line: one of the exit codes 0, 1, 2 and
130, and no traceback), within its time limit. No answer may be wrong in silence:

    corrupted files     a model with a manifest gives the score it gave before, or is refused
    checkpoints         a run that goes on ends in the bits of one that nothing disturbed, or is refused
    prepared texts      `vlhmm evaluate` reports what it reported before, or refuses
    texts               scores are no NaN and at most 0, one per line, and `vlhmm evaluate` reports their sum

Failures are printed with what is needed to repeat them; those that were found and mended are kept in
tests/trust/findings.json, which the test suite replays.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import importlib.util
import io
import json
import logging
import math
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import vlhmm
from benchmarks import machine
from vlhmm.baselines.kneser_ney import KneserNey
from vlhmm.cli import numbers
from vlhmm.cli.main import main as command
from vlhmm.clustering.blocks import Blocks
from vlhmm.clustering.paths import read_paths
from vlhmm.config import override
from vlhmm.constraints.constraint import compile_constraint, must_contain, regex
from vlhmm.data.atomic_io import write_atomically
from vlhmm.data.manifest import MODEL_FILES, check_manifest
from vlhmm.data.text import read_lines
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import VlhmmError
from vlhmm.lattice.template import parse_template
from vlhmm.training.config import RunConfig
from vlhmm.training.run_folder import RunFolder

LIMIT = 30.0  # seconds per case
WORDS = ("the", "big", "small", "cat", "dog", "cats", "dogs", "here", "there", "runs", "run", ".")
SENTENCE = "the big dog here runs ."
HOSTILE = (
    "", "0", "-1", "1", "2", "7", "1e400", "nan", "inf", "-inf", "9" * 5000, "1" + "0" * 30, "2^99", "2^1000000000", "0x10", "\u0663",
    "1_0", " 3", "3 ", "1-2", "2-1", "1-", "-", "--", "true", "none", "[]", "{}", "x", "\0", "a\udcffb", "\x1b[31m", "é", "'", '"', "%s",
    "../../etc/passwd", "/dev/null", "a" * 5000, "999999999", "1000000000", "1000000001", "0.5", "1e-300", "1.5h", "4G", "500M", "0M",
)  # fmt: skip


class TooSlow(BaseException):
    """A case took longer than its limit; no handler of errors catches it."""


class World(NamedTuple):
    """Small trained models of every kind, and what they say of one sentence."""

    folder: Path
    scores: dict[str, float]
    vocabulary: Vocabulary
    resumed: dict[str, bytes] = {}  # what the run that was stopped halfway ends in
    prepared: dict[str, Any] = {}  # what `vlhmm evaluate` says of the prepared text


class Failure(NamedTuple):
    """A case that did not pass."""

    kind: str
    case: str
    why: str


HALF = ["--preset", "tiny", "--states", "16", "--blocks", "4", "--epochs", "2", "--set", "training.calibrate=true",
        "--set", "training.checkpoint_seconds=0.001", "--set", "training.batch_tokens=128"]  # fmt: skip
RESULTS = ("model.safetensors", "calibration.json", "config.json", "vocabulary.txt", "blocks.tsv")


def make_world(folder: Path) -> World:
    """Train models of every kind and a run stopped halfway, on a few hundred sentences: seconds.

    An HMM over words, one over the ids of a tokenizer where tokenizers is installed, Kneser-Ney, a feed-forward network, a
    mixture; and a prepared text.
    """
    draw = random.Random(0)

    def sentences(count: int) -> str:
        rows = []
        for _ in range(count):
            one = draw.random() < 0.5
            noun = draw.choice(("cat", "dog") if one else ("cats", "dogs"))
            rows.append(f"the {draw.choice(WORDS[1:3])} {noun} {draw.choice(WORDS[7:9])} {'runs' if one else 'run'} .")
        return "\n".join(rows) + "\n"

    (folder / "train.txt").write_text(sentences(200))
    (folder / "valid.txt").write_text(sentences(40))
    texts = [str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--quiet"]
    tiny = ["--preset", "tiny", "--states", "32", "--blocks", "4", "--epochs", "1", "--set", "training.calibrate=true"]
    small = ["--epochs", "1", "--set", "hidden_size=8", "--set", "num_streams=4", "--set", "segment_length=8"]
    runs = {
        "hmm": ["train", *texts, *tiny],
        "kn": ["baseline", "kn", *texts, "--order", "3"],
        "ff": ["baseline", "ff", *texts, *small],
        "mix": ["mix", str(folder / "hmm"), str(folder / "kn"), "--valid", str(folder / "valid.txt"), "--quiet"],
    }
    if importlib.util.find_spec("tokenizers"):
        write_tokenizer(folder / "tokenizer.json")
        runs["ids"] = ["train", *texts, *tiny, "--tokenizer", str(folder)]
    runs["prepared"] = ["prepare", str(folder / "valid.txt"), "--vocab", str(folder / "hmm" / "vocabulary.txt"), "--quiet"]
    scores = {}
    for kind, arguments in runs.items():
        run_command([*arguments, "--out", str(folder / kind)])
        if kind != "prepared":
            scores[kind] = score_of(folder / kind)
    world = World(folder, scores, Vocabulary.read(folder / "hmm" / "vocabulary.txt"))
    with stopped_at_checkpoint(3):
        run_command(half_run(world, folder / "half"), expected=130)
    shutil.copytree(folder / "half", folder / "whole")
    run_command(half_run(world, folder / "whole"))
    reported = json.loads(run_command(["evaluate", str(folder / "hmm"), str(folder / "prepared"), "--format", "json"]))
    return world._replace(
        resumed={name: (folder / "whole" / name).read_bytes() for name in RESULTS}, prepared=without_names(reported)
    )


def run_command(arguments: list[str], expected: int = 0) -> str:
    """Run a command that must end with one exit code; its standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = command(arguments)
    if code != expected:
        raise SystemExit(f"cannot make the models to fuzz: vlhmm {arguments[0]} ended with {code}, expected {expected}")
    return out.getvalue()


def half_run(world: World, out: Path) -> list[str]:
    """Return the command that trains a run, and goes on with it."""
    folder = world.folder
    return ["train", str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--quiet", *HALF, "--out", str(out)]


@contextlib.contextmanager
def stopped_at_checkpoint(number: int) -> Iterator[None]:
    """Send this process SIGTERM after this many checkpoints."""
    real, count = RunFolder.save_checkpoint, [0]

    def save(self: RunFolder, state: dict[str, Any], tensors: dict[str, Any]) -> None:
        real(self, state, tensors)
        count[0] += 1
        if count[0] == number:
            signal.raise_signal(signal.SIGTERM)

    RunFolder.save_checkpoint = save  # type: ignore[method-assign]
    try:
        yield
    finally:
        RunFolder.save_checkpoint = real  # type: ignore[method-assign]


def without_names(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report of `vlhmm evaluate` without the paths in it."""
    return {name: value for name, value in report.items() if name not in ("file", "run")}


def write_tokenizer(path: Path) -> None:
    """Return a tokenizer of whole words."""
    import tokenizers

    ids = {word: number for number, word in enumerate(("</s>", "<unk>", *WORDS))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))


def score_of(run: Path) -> float:
    """Return log p of one sentence under the model of a folder, read from its files."""
    from vlhmm.queries.left_to_right import score_lines

    return next(iter(score_lines(vlhmm.load_any(run), [SENTENCE.split()]))).log_prob


# ---- mutations


def mutated(draw: random.Random, content: bytes) -> bytes:
    """Return the bytes with one to three random changes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        content = _mutation(draw, content)
    return content


def _mutation(draw: random.Random, content: bytes) -> bytes:
    size = len(content)
    place = draw.randrange(size) if size else 0
    end = min(size, place + draw.choice((1, 2, 8, 64, 1024)))
    lines = content.splitlines(keepends=True)
    kind = draw.randrange(13)
    if kind < 4 and size:
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if kind == 4:
        return content[:place]
    if kind == 5:
        return content[:place] + content[end:]
    if kind == 6:
        return content[:end] + content[place:]
    if kind == 7:
        return content[:place] + draw.randbytes(draw.choice((1, 4, 100))) + content[end:]
    if kind == 8 and len(lines) > 1:
        a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
        return b"".join(lines)
    if kind == 9:
        draw.shuffle(lines)
        return b"".join(lines)
    if kind == 10:
        return draw.choice((b"", b"\n", b"{}", b"[]", b"null", b"\0" * 100, b"[" * 50_000, b"\xff\xfe", b"\x1f\x8b", content * 2))
    number = draw.choice(HOSTILE).encode("utf-8", "surrogateescape")
    digits = [i for i, byte in enumerate(content[:100_000]) if 48 <= byte < 58]
    if digits:
        first = draw.choice(digits)
        return content[:first] + number + content[first + 1 :]
    return content + number


# ---- kinds of cases: each draws one, does it, and says "answered" or "refused"


def corrupted_file(draw: random.Random, world: World, note: list[str]) -> str:
    kinds = [kind for kind in ("hmm", "hmm", "hmm", "ids", "kn", "ff", "mix") if kind in world.scores]
    kind = draw.choice(kinds)
    with copied(world.folder / kind) as run:
        inside = [path for path in run.rglob("*") if path.is_file() and path.name != "journal.jsonl"]
        inside = [path for path in inside if path.name in MODEL_FILES or path.name == "manifest.json"]
        path = draw.choice(sorted(inside))
        whole = path.read_bytes()
        other = world.folder / draw.choice(kinds) / path.name
        with_manifest = draw.random() < 0.5
        note.append(f"{kind}/{path.relative_to(run)} {'with' if with_manifest else 'without'} manifest")
        if draw.random() < 0.05:
            note.append("gone")
            path.unlink()
            changed = None
        elif draw.random() < 0.05 and other.is_file():
            note.append(f"that of {other.parent.name}")
            changed = other.read_bytes()
        else:
            changed = mutated(draw, whole)
        if changed is not None:
            path.write_bytes(changed)
        if not with_manifest:
            for manifest in run.rglob("manifest.json"):
                manifest.unlink()
        score = score_of(run)
        if changed != whole and with_manifest and score != world.scores[kind]:
            raise AssertionError(f"a changed file loads in silence: log p {score}, before {world.scores[kind]}")
        if math.isnan(score):
            raise AssertionError("log p is not a number")
    return "answered"


@contextlib.contextmanager
def copied(run: Path, checkpoint: bool = False) -> Iterator[Path]:
    """Copy a run for one case."""
    with tempfile.TemporaryDirectory(prefix="vlhmm-fuzz-") as name:
        target = Path(name) / "run"
        shutil.copytree(run, target, ignore=None if checkpoint else shutil.ignore_patterns("checkpoint"))
        yield target


def corrupt_one(draw: random.Random, folder: Path, note: list[str], names: Callable[[Path], bool] = lambda _: True) -> None:
    """Change one file of a folder, or remove it."""
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and names(path)))
    gone = draw.random() < 0.1
    note.append(f"{path.relative_to(folder)}{' gone' if gone else ''}")
    content = path.read_bytes()
    path.unlink()
    if not gone:
        path.write_bytes(mutated(draw, content))


def outcome_of(arguments: list[str], stdin: bytes = b"") -> tuple[int, str]:
    """Return (exit code, standard output) of a command; raise an AssertionError for a traceback, another code or no error line."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: Any = command(arguments)
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.stdin = before
    said = err.getvalue()
    if code not in (0, 1, 2, 130):
        raise AssertionError(f"exit code {code}")
    if "Traceback" in said or (code == 2 and (not said.strip() or len(said.splitlines()[-1]) > 2000)):
        raise AssertionError(f"exit code {code}, standard error {said[-300:]!r}")
    return code, out.getvalue()


def checkpoint(draw: random.Random, world: World, note: list[str]) -> str:
    """Damage one file of an interrupted or finished run, and give the same command again."""
    kind = draw.choice(("half", "half", "whole"))
    note.append(kind)
    with copied(world.folder / kind, checkpoint=True) as run:
        corrupt_one(draw, run, note)
        code, _ = outcome_of(half_run(world, run))
        if code:
            return "refused"
        for name, content in world.resumed.items():
            if (run / name).read_bytes() != content:
                raise AssertionError(f"training goes on in silence to another {name}")
        check_manifest(run)
    return "answered"


def prepared_text(draw: random.Random, world: World, note: list[str]) -> str:
    """Damage one file of a prepared text, and evaluate the text."""
    with copied(world.folder / "prepared") as text:
        corrupt_one(draw, text, note)
        code, out = outcome_of(["evaluate", str(world.folder / "hmm"), str(text), "--format", "json", "--quiet"])
        if code:
            return "refused"
        if without_names(json.loads(out)) != world.prepared:
            raise AssertionError(f"a changed text is evaluated in silence: {out[:300]}")
    return "answered"


def hostile_text(draw: random.Random, world: World, note: list[str]) -> str:
    """Score a text with odd encodings, control characters and long lines, from a file and from standard input."""
    content = b"\n".join(text_bytes(draw) for _ in range(draw.choice((1, 1, 2))))
    run = str(world.folder / draw.choice(sorted(world.scores)))
    note.append(f"{Path(run).name} {content[:300]!r}")
    with tempfile.TemporaryDirectory(prefix="vlhmm-fuzz-") as name:
        path = Path(name) / ("text.gz" if content[:2] == b"\x1f\x8b" else "text.txt")
        path.write_bytes(content)
        evaluated, report = outcome_of(["evaluate", run, str(path), "--context", "reset", "--format", "json", "--quiet"])
    code, out = outcome_of(["score", run, "--format", "jsonl", "--quiet"], content)
    if code or evaluated:
        return "refused"
    rows = [json.loads(line) for line in out.splitlines()]
    values = [-math.inf if row["log_prob"] == "-inf" else row["log_prob"] for row in rows]
    if not all(value <= 1e-9 for value in values):  # a NaN is not
        raise AssertionError(f"scores {values[:5]}")
    reported = json.loads(report)
    total = reported["log_likelihood"] if reported["log_likelihood"] not in (None, "-inf") else -math.inf
    if vlhmm.load_any(run).rule == "reset" and not math.isclose(math.fsum(values), total, rel_tol=1e-4, abs_tol=1e-3):
        raise AssertionError(f"the lines sum to {math.fsum(values)}, the text has {total}")
    return "answered"


OPTIONS = {
    "infill": ["-n", "--top-k", "--length", "--regex", "--must-contain", "--must-not", "--memory", "--seed", "--mode"],
    "sample": ["-n", "--max-tokens", "--top-k", "--top-p", "--temperature", "--prompt", "--length", "--seed", "--memory"],
    "next": ["--top-k", "--format"],
    "decode": ["-k", "--top-k", "--method", "--memory"],
    "information": ["--streams", "--tokens", "--max-tokens", "--prompt"],
    "surprisal": ["--worst", "--each", "--top-k"],
    "inspect": ["--top-k", "--format"],
    "evaluate": ["--streams", "--context", "--memory"],
    "score": ["--log-base", "--format"],
    "verify": ["--texts"],
    "manifest": ["--accept"],
    "cluster": ["--blocks", "--sweeps", "--max-vocab", "--min-count"],
    "export": ["--format"],
    "mix": ["--weights", "--context", "--memory", "--seed", "--threads"],
    "prepare": ["--shard-tokens", "--max-types", "--max-vocab", "--min-count", "--tokenizer", "--end-of-text", "--vocab"],
    "baseline": ["--order", "--max-vocab", "--min-count", "--sample-tokens", "--set", "--seed", "--epochs"],
    "train": ["--states", "--blocks", "--epochs", "--set", "--seed", "--memory", "--time-limit", "--max-vocab", "--mix", "--preset"],
    "distill": ["--tokens", "--temperature", "--iterations", "--states", "--tokenizer", "--template", "--batch", "--max-new-tokens"],
    "steer": ["-n", "--words", "--regex", "--must-include", "--must-not", "--json-schema", "--max-new-tokens", "--weight", "--particles", "--beams"],
    "completion": [],
}


def command_line(draw: random.Random, world: World, note: list[str]) -> str:
    verb = draw.choice(sorted(OPTIONS))
    run = str(world.folder / draw.choice(("hmm", "hmm", "hmm", "kn", "mix")))
    text = text_with_masks(draw) if draw.random() < 0.5 else draw.choice(HOSTILE)
    train, valid = str(world.folder / "train.txt"), str(world.folder / "valid.txt")
    given = {
        "infill": [run, text], "next": [run, text], "information": [run, draw.choice(("entropy", "phrase", "kl")), text],
        "inspect": [run, draw.choice(("state", "word", "block", "x")), draw.choice((*HOSTILE, "the", "3"))], "evaluate": [run, "-"],
        "cluster": ["-"], "manifest": [str(world.folder / "kn")], "export": [run, draw.choice(HOSTILE) or "x"],
        "mix": [run, str(world.folder / "kn"), "--valid", valid, "--out", "mixed"], "prepare": [valid, "--out", "prepared"],
        "baseline": ["kn", train, "--valid", valid, "--out", "kn"], "completion": [draw.choice(HOSTILE)],
        "train": [train, "--valid", valid, "--out", "run", "--preset", "tiny", "--dry-run"],
        "distill": ["--samples", train, "--out", "distilled", "--preset", "tiny"],  # no tokenizer: always refused
        "steer": [run, "--llm", "./nowhere", "--prompt", text],  # there is no such model: always refused
    }.get(verb, [run])  # fmt: skip
    if verb == "export":
        given[1] = given[1].replace("/", "_")  # nothing is written outside this case's own folder
    arguments = [verb, *given]
    for option in draw.sample(OPTIONS[verb], k=min(len(OPTIONS[verb]), draw.choice((0, 1, 1, 2)))):
        value = draw.choice(HOSTILE)
        if (option in ("--streams", "--tokens", "-n", "--max-tokens", "--texts")) and len(value) < 12 and value.isdigit():
            value = str(int(value) % 50 if int(value) < 10**9 else int(value))  # what is allowed need not be large
        arguments += [option] if option == "--accept" else [option + "=" + value]
    note.append(repr(arguments))
    with tempfile.TemporaryDirectory(prefix="vlhmm-fuzz-") as name, contextlib.chdir(name):
        code, _ = outcome_of(arguments, text_bytes(draw))
    return "refused" if code else "answered"


def text_bytes(draw: random.Random) -> bytes:
    """Return lines of text, some of them odd."""
    lines = [" ".join(draw.choices(WORDS, k=draw.choice((0, 1, 5, 9)))) for _ in range(draw.choice((0, 1, 3)))]
    if draw.random() < 0.3:
        lines.append(draw.choice(HOSTILE).replace("\udcff", "\u00ff"))
    if draw.random() < 0.05:
        lines.append(" ".join(draw.choices(WORDS, k=3000)))
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    pick = draw.random()
    if pick < 0.05:
        return gzip.compress(content)[: draw.choice((10, 1000))]
    if pick < 0.1:
        return "\ufeff".encode() + content
    if pick < 0.15:
        return content.decode("utf-8", "replace").encode("utf-16")
    return mutated(draw, content) if pick < 0.3 else content


def text_with_masks(draw: random.Random) -> str:
    parts = []
    for _ in range(draw.choice((1, 3, 6))):
        mask = draw.choice(("[MASK]", "[MASK:2]", "[MASK:1-3]", "[MASK:{}]", "[MASK:{}-{}]", "[MASK", "[MASK]]", "[MASK:]"))
        parts.append(mask.replace("{}", draw.choice(HOSTILE)) if draw.random() < 0.3 else draw.choice(WORDS))
    return " ".join(parts)


def expression(draw: random.Random, depth: int = 0) -> str:
    """Return a pattern over words, or something near it."""
    if depth > 3 or draw.random() < 0.3:
        return draw.choice((*WORDS, ".", "[the cat]", "[^dog]", "\\.", "\\*", "[]", "{", "}", "*", draw.choice(HOSTILE)))
    pick = draw.randrange(7)
    inner = expression(draw, depth + 1)
    if pick == 0:
        return f"({inner})"
    if pick == 1:
        return inner + draw.choice("*+?")
    if pick == 2:
        return f"{inner}{{{draw.choice((*HOSTILE, '3', '2,4', ',3', '2,'))}}}"
    if pick == 3:
        return f"{inner} | {expression(draw, depth + 1)}"
    return f"{inner} {expression(draw, depth + 1)}"


def parsed(kind: str, text: str, world: World, folder: Path) -> None:
    """Give one parser one input; the parsers that read files get it as one."""
    vocabulary = world.vocabulary
    if kind == "mask":
        parse_template(vocabulary, text)
    elif kind == "regex":
        compile_constraint(regex(text), vocabulary)
    elif kind == "phrase":
        compile_constraint(must_contain(text), vocabulary)
    elif kind == "setting":
        override(RunConfig(), [text])
    elif kind == "number":
        name, _, value = text.partition("=")
        reader: Callable[[str], float] = {"count": numbers.count(1), "real": numbers.real(0, 1)}.get(name) or getattr(numbers, name)
        with contextlib.suppress(argparse.ArgumentTypeError):
            reader(value)
    else:
        path = folder / kind
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        if kind == "arpa":
            KneserNey.read_arpa(path)
        elif kind == "paths":
            read_paths(path, vocabulary.words)
        elif kind == "blocks":
            Blocks.read(path, vocabulary.words)
        elif kind == "vocabulary":
            Vocabulary.read(path)
        elif kind == "text":
            for _ in read_lines(path):
                pass


def parser_input(draw: random.Random, world: World, note: list[str]) -> str:
    kind = draw.choice(("mask", "regex", "phrase", "setting", "number", "arpa", "paths", "blocks", "vocabulary", "text"))
    text = input_of(draw, kind, world)
    note.append(json.dumps({"kind": kind, "input": text}))
    with tempfile.TemporaryDirectory(prefix="vlhmm-fuzz-") as name:
        parsed(kind, text, world, Path(name))
    return "answered"


def input_of(draw: random.Random, kind: str, world: World) -> str:
    if kind == "mask":
        return text_with_masks(draw)
    if kind == "regex":
        return expression(draw)
    if kind == "phrase":
        return " ".join(draw.choices((*WORDS, "zebra", draw.choice(HOSTILE)), k=draw.choice((0, 1, 3, 40))))
    if kind == "number":
        return f"{draw.choice(('count', 'real', 'duration', 'byte_size', 'seed', 'tokens'))}={draw.choice(HOSTILE)}"
    if kind == "setting":
        names = ("model.num_states", "model.hidden_size", "training.rate", "training.seed", "model.within", "min_count", "modle.x", "model", "")
        return f"{draw.choice(names)}{draw.choice(('=', '=', '=', '', '=='))}{draw.choice(HOSTILE)}"
    seeds = {
        "arpa": "\\data\\\nngram 1=4\nngram 2=2\n\n\\1-grams:\n-1\t<s>\t-0.3\n-0.5\tthe\t-0.3\n-1\t</s>\n-2\t<unk>\n\n\\2-grams:\n"
        "-0.5\t<s> the\n-0.1\tthe </s>\n\n\\end\\\n",
        "paths": "".join(f"{i % 4:02b}\t{word}\t{i}\n" for i, word in enumerate(world.vocabulary.words)),
        "blocks": (world.folder / "hmm" / "blocks.tsv").read_text(),
        "vocabulary": "\n".join(world.vocabulary.words) + "\n",
        "text": "the big cat\nthe dog .\n\n",
    }
    return mutated(draw, seeds[kind].encode()).decode("utf-8", "surrogateescape")


KINDS: dict[str, tuple[float, Callable[[random.Random, World, list[str]], str]]] = {
    "parsers": (0.64, parser_input),
    "corrupted files": (0.2, corrupted_file),
    "command lines": (0.08, command_line),
    "texts": (0.04, hostile_text),
    "prepared texts": (0.03, prepared_text),
    "checkpoints": (0.01, checkpoint),
}


# ---- the run


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in the body after `seconds`."""

    def stop(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_case(kind: str, number: int, seed: int, world: World, limit: float = LIMIT) -> tuple[str, Failure | None]:
    """Do one case; (answered, refused or failed; the failure)."""
    draw, note = random.Random(f"{seed}/{number}"), []
    try:
        with limited(limit):
            return KINDS[kind][1](draw, world, note), None
    except VlhmmError as error:
        if len(str(error)) < 2000:
            return "refused", None
        why = f"the error line has {len(str(error))} characters"
    except TooSlow:
        why = f"took more than {limit:.0f} s"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {str(error)[:200]} ({Path(last.filename).name}:{last.lineno})"
    return "failed", Failure(kind, f"case {number} of seed {seed}: {'; '.join(note)[:1000]}", why)


def fuzz(cases: int, seed: int, world: World, progress: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Run the cases; the counts and the failures as a record."""
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in KINDS}
    slowest: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    failures: list[Failure] = []
    names, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    began = time.monotonic()
    for number in range(cases):
        kind = random.Random(f"kind {seed}/{number}").choices(names, weights)[0]
        started = time.monotonic()
        outcome, failure = run_case(kind, number, seed, world)
        slowest[kind] = max(slowest[kind], time.monotonic() - started)
        counts[kind][outcome] += 1
        if failure is not None:
            failures.append(failure)
        if progress is not None and (number + 1) % 1000 == 0:
            progress(_record(number + 1, seed, began, counts, slowest, failures))
    return _record(cases, seed, began, counts, slowest, failures)


def _record(
    cases: int,
    seed: int,
    began: float,
    counts: dict[str, collections.Counter[str]],
    slowest: dict[str, float],
    failures: list[Failure],
) -> dict[str, Any]:
    return {
        "cases": cases,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "limit_seconds": LIMIT,
        "outcomes": {kind: dict(sorted(found.items())) for kind, found in counts.items()},
        "slowest_seconds": {kind: round(value, 2) for kind, value in slowest.items()},
        "failures": [failure._asdict() for failure in failures],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the cases; return 0 if all pass, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--cases", type=numbers.count(1), default=100_000, metavar="N", help="default: 100,000")
    parser.add_argument("--seed", type=numbers.seed, default=0, help="of everything drawn (default: 0)")
    parser.add_argument("--record", metavar="FILE", help="write the counts there, as JSON")
    args = parser.parse_args(arguments)
    about = {
        "command": f"python -m benchmarks.fuzz --cases {args.cases} --seed {args.seed}",
        "commit": machine.commit(),
        "machine": machine.describe(),
    }
    logging.disable(logging.WARNING)  # folders without a manifest say so
    with tempfile.TemporaryDirectory(prefix="vlhmm-fuzz-") as name:
        world = make_world(Path(name))

        def keep(record: dict[str, Any]) -> None:
            if args.record:
                write_atomically(args.record, (json.dumps(about | record, indent=2) + "\n").encode())

        def progress(record: dict[str, Any]) -> None:
            keep(record)
            print(f"{record['cases']:,} of {args.cases:,} cases, {record['seconds']:.0f} s", file=sys.stderr, flush=True)

        record = fuzz(args.cases, args.seed, world, progress)
    keep(record)
    print(json.dumps(about | record, indent=2))
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

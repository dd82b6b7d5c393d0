"""`vlhmm prepare`: convert texts to a folder of ids, which train, cluster and evaluate read in parts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vlhmm.cli.common import add_format, add_vocabulary_limits, log_to, terminal_bar
from vlhmm.cli.numbers import tokens
from vlhmm.limits import counted

DESCRIPTION = "Write texts as shards of ids with checksums."
EPILOG = """\
TEXT is a text file with one sentence per line and words separated by blanks (UTF-8, also .gz or .zst), or - for
standard input. Several files are read as one text, in the order given.

examples:
  vlhmm prepare part-*.txt.zst --max-vocab 50000 --out data/news
  vlhmm train data/news --valid valid.txt --set training.em_tokens=2000000 --out runs/news
  vlhmm cluster data/news --blocks 512 --out paths.txt
  vlhmm prepare held-out.txt --vocab data/news/vocabulary.txt --out data/held-out
  vlhmm prepare samples-*.jsonl.gz --tokenizer tokenizer.json --out data/samples      subword ids

The text is read once and written as shards of 16- or 32-bit ids with line ends and checksums. The layout is described
in docs/prepared.md. Memory use does not grow with the text.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="a text file, or - for standard input")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to write")
    parser.add_argument("--vocab", metavar="FILE", help="use this vocabulary, one word per line")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="write the ids of a Hugging Face tokenizer.json (pip install 'vlhmm[llm]')"
    )
    parser.add_argument(
        "--end-of-text", metavar="TOKEN", help="token that ends every text (default: <|im_end|>, </s>, ...)"
    )
    add_vocabulary_limits(parser)
    parser.add_argument(
        "--shard-tokens", type=tokens, default=1 << 25, metavar="N", help="tokens per shard (default: 2^25)"
    )
    parser.add_argument(
        "--max-types",
        type=tokens,
        default=1 << 22,
        metavar="N",
        help="largest number of distinct words to count; later ones become <unk> (default: 2^22)",
    )
    add_format(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress and no messages")


def run(args: argparse.Namespace) -> int:
    """Write the folder; return 0."""
    from vlhmm.cli.train import given_vocabulary
    from vlhmm.data.prepared import prepare

    vocabulary = given_vocabulary(args)
    with _progress(args.quiet) as progress:
        text = prepare(
            args.texts,
            args.out,
            vocabulary,
            args.max_vocab,
            args.min_count,
            shard_tokens=args.shard_tokens,
            max_types=args.max_types,
            log=log_to(args.quiet),
            progress=progress,
        )
    summary = {
        "out": args.out,
        "tokens": text.num_tokens,
        "sentences": text.num_sentences,
        "vocabulary_size": len(text.vocabulary),
        "oov": text.num_oov,
        "literal_unk": text.num_unk,
        "bytes": text.num_bytes,
        "shards": len(text.shards),
        "digest": text.digest,
    }
    if args.format == "json":
        print(json.dumps(summary))
    else:
        print(
            f"{args.out}: {counted(text.num_tokens, 'token')} in {counted(text.num_sentences, 'line')}, "
            f"{counted(len(text.vocabulary), 'word')}, {counted(text.num_oov, 'token')} out of vocabulary, "
            f"{counted(len(text.shards), 'shard')}"
        )
    return 0


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a bar over tokens on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with terminal_bar("TimeElapsedColumn") as bar:
        task = bar.add_task("reading", total=None)

        def draw(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"{stage} {done / 1e6:,.1f}M tokens", completed=done, total=total or None)

        yield draw

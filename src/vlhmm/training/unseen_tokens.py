"""Tokens of a tokenizer that the training text does not hold: their blocks and their probabilities.

A subword model must be able to emit every id. An id v that was never seen gets a *partner*, a token u seen once that is
spelled alike (same leading blank, same kind of characters, same last letters where there are enough such tokens). It
joins the block of u, and its emission parameters are those of u at a fixed fraction:

    p(v | z) = r p(u | z),    r = min(1, N_1 / N_0)

with N_1 tokens seen once and N_0 never. By Good and Turing's estimate all unseen tokens together occur as often as all
those seen once. Special tokens and the end of text have a block of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vlhmm.clustering.blocks import Blocks
from vlhmm.clustering.cluster import ClusteringResult, cluster_words
from vlhmm.components.config import ModelConfig
from vlhmm.data.prepared import token_stream
from vlhmm.data.text import Text
from vlhmm.data.tokenizer import TokenVocabulary
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import ConfigError
from vlhmm.hmm import HMM

LEAST_PARTNERS = 8  # tokens spelled alike, or a coarser likeness is taken


def spelling(token: bytes) -> tuple[str, ...]:
    """Return the spelling of a token from coarse to fine: kind of characters, leading blank, last two, last three letters."""
    text = token.decode("utf-8", errors="replace")
    word = text.strip()
    if not word:
        kind = "blank"
    elif word.isdigit():
        kind = "number"
    elif word.isalpha():
        kind = "capitals" if len(word) > 1 and word.isupper() else "capitalized" if word[0].isupper() else "lower"
        kind += "" if word.isascii() else " foreign"
    else:
        kind = "mixed" if any(c.isalnum() for c in word) else "punctuation"
    blank = "blank" if text[:1].isspace() else "none"
    return kind, blank, word[-2:].lower(), word[-3:].lower()


def partner_of_token(vocabulary: TokenVocabulary, counts: np.ndarray) -> np.ndarray:
    """Return (V,) the seen token whose block and parameters an unseen one shares; -1 for tokens that were seen.

    Partners are the rarest tokens that are spelled alike, taken in turns. Unseen special tokens have the end of text.
    """
    partner = np.full(len(vocabulary), -1, dtype=np.int64)
    special = np.zeros(len(vocabulary), dtype=bool)
    special[list(vocabulary.special)] = True
    partner[special & (counts == 0)] = vocabulary.eos
    partner[vocabulary.eos] = -1
    seen = np.flatnonzero((counts > 0) & ~special)
    if not len(seen):
        raise ConfigError("the training text has no token but special ones; give it some text")
    rare = seen[counts[seen] == counts[seen].min()]
    spellings = {int(i): spelling(vocabulary.token_bytes[i]) for i in rare}
    alike: dict[tuple[str, ...], list[int]] = {(): rare.tolist()}
    for i, spelled in spellings.items():
        for depth in range(1, len(spelled) + 1):
            alike.setdefault(spelled[:depth], []).append(i)
    turns: dict[tuple[str, ...], int] = {}
    for i in np.flatnonzero((counts == 0) & ~special).tolist():
        key = spelling(vocabulary.token_bytes[i])
        while key and len(alike.get(key, ())) < LEAST_PARTNERS:
            key = key[:-1]
        turn = turns.get(key, 0)
        turns[key] = turn + 1
        partner[i] = alike[key][turn % len(alike[key])]
    return partner


def token_blocks(
    found: ClusteringResult, tokens: np.ndarray | Text, vocabulary: TokenVocabulary, sweeps: int
) -> np.ndarray:
    """Return block_of_word (V,): Brown clusters of ordinary tokens, special tokens apart, unseen ones with their partners.

    Where the end of text shares its cluster with ordinary tokens, one block fewer is asked for and it gets the last.
    """
    num_blocks = found.num_blocks
    if num_blocks < 2:
        raise ConfigError("a model over a tokenizer's ids needs 2 blocks or more: special tokens have their own")
    special = np.array(sorted(vocabulary.special))
    counts = found.word_count
    ordinary = counts > 0
    ordinary[special] = False
    blocks, own = found.block_of_word.copy(), int(found.block_of_word[vocabulary.eos])
    if counts[vocabulary.eos] == 0 or (blocks[ordinary] == own).any() or len(np.unique(blocks[ordinary])) < num_blocks - 1:
        blocks = cluster_words(token_stream(tokens), len(vocabulary), num_blocks - 1, sweeps=sweeps).block_of_word.copy()
        own = num_blocks - 1
        empty = np.setdiff1d(np.arange(own), blocks[ordinary])
        if len(empty):  # special tokens had a cluster among these too: it takes the place of the last
            raise ConfigError(
                f"{len(empty)} of {num_blocks} blocks would hold special tokens alone; take fewer blocks (--blocks)"
            )
    blocks[special] = own
    partner = partner_of_token(vocabulary, counts)
    unseen = partner >= 0
    blocks[unseen] = blocks[partner[unseen]]
    return blocks


@dataclass(frozen=True, eq=False)
class UnseenTokens:
    """Rows of the emission parameters that are tied to others: exact gradients of the tied model, in place."""

    unseen: Tensor  # (U,) ids
    partner: Tensor  # (U,) ids
    log_ratio: Tensor  # (U,) log r

    def to(self, device: torch.device) -> UnseenTokens:
        return replace(
            self, unseen=self.unseen.to(device), partner=self.partner.to(device), log_ratio=self.log_ratio.to(device)
        )

    def share_gradients(self, hmm: HMM) -> None:
        """Add the gradients of unseen tokens to their partners', whose parameters they share."""
        for parameter in (hmm.word.weight, hmm.word.bias):
            gradient = parameter.grad
            if gradient is not None:
                gradient.index_add_(0, self.partner, gradient[self.unseen])
                gradient[self.unseen] = 0.0

    @torch.no_grad()
    def copy_parameters(self, hmm: HMM) -> None:
        """Set the parameters of unseen tokens from their partners'."""
        hmm.word.weight[self.unseen] = hmm.word.weight[self.partner]
        hmm.word.bias[self.unseen] = hmm.word.bias[self.partner] + self.log_ratio


def unseen_tokens(
    vocabulary: Vocabulary, counts: np.ndarray, blocks: Blocks, config: ModelConfig
) -> UnseenTokens | None:
    """Return the tied rows of a model over a tokenizer's ids; None for models over words, and where every id was seen."""
    if not isinstance(vocabulary, TokenVocabulary):
        return None
    if config.parameterization != "neural":
        raise ConfigError("a model over a tokenizer's ids takes model.parameterization=neural: unseen ids share vectors")
    partner = partner_of_token(vocabulary, counts)
    unseen = np.flatnonzero(partner >= 0)
    if not len(unseen):
        return None
    if (blocks.block_of_word[unseen] != blocks.block_of_word[partner[unseen]]).any():
        raise ConfigError("blocks do not keep unseen tokens with those they share parameters with; let them be made")
    special = np.isin(unseen, list(vocabulary.special))
    never = int((~special).sum())
    once = int((counts == counts[counts > 0].min()).sum())
    ratio = math.log(min(1.0, once / never)) if never else 0.0
    log_ratio = np.where(special, -math.log(1 + int(counts.sum())), ratio)
    return UnseenTokens(
        torch.from_numpy(unseen), torch.from_numpy(partner[unseen]), torch.from_numpy(log_ratio).float()
    )

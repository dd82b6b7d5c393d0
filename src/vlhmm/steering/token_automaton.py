"""Compile a constraint on text to an automaton over the tokens of a language model.

Input:  a `ByteAutomaton` and the bytes of every token.
Output: `TokenAutomaton`. It accepts every segmentation of every accepted text, followed by one end token. Tokens with
        the same effect in every state form a class.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numba
import numpy as np

from vlhmm.data.tokenizer import byte_of_character
from vlhmm.errors import ConfigError, QueryError
from vlhmm.steering.byte_automaton import DEAD, ByteAutomaton, equivalent


class Tokenizer(Protocol):
    """The attributes of a Hugging Face tokenizer that are used here."""

    all_special_ids: list[int]

    def get_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A deterministic automaton over tokens. State 0 is initial; only an end token leads to `final`."""

    delta: np.ndarray  # (Q, C) int32: the state after a token of that class, or -1
    class_of_token: np.ndarray  # (V,) int32
    final: int

    @property
    def num_states(self) -> int:
        return len(self.delta)

    @property
    def num_classes(self) -> int:
        return self.delta.shape[1]

    @cached_property
    def content_hash(self) -> str:
        """Return a hash of the automaton's content, the key of cached lookahead tables."""
        digest = hashlib.sha256(f"{self.delta.shape} {self.final}".encode())
        for array in (self.delta, self.class_of_token):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @cached_property
    def distance(self) -> np.ndarray:
        """Return the least number of tokens from each state to `final`, (Q,) int64, the end token included; large if none."""
        never = 1 << 40
        distance = np.full(self.num_states + 1, never, dtype=np.int64)  # the last entry is the state -1
        distance[self.final] = 0
        while True:
            shorter = np.minimum(distance[:-1], distance[self.delta].min(axis=1) + 1)
            if (shorter == distance[:-1]).all():
                return np.minimum(distance[:-1], never)
            distance[:-1] = shorter

    @cached_property
    def reached(self) -> np.ndarray:
        """Return the least number of tokens from the initial state to each state, (Q,) int64; large if unreachable."""
        reached = np.full(self.num_states, 1 << 40, dtype=np.int64)
        reached[0] = 0
        frontier, steps = np.array([0]), 0
        while len(frontier):
            steps += 1
            following = np.unique(self.delta[frontier])
            following = following[following != DEAD]
            frontier = following[reached[following] > steps]
            reached[frontier] = steps
        return reached

    def step(self, state: int, token: int) -> int:
        """Return the state after a token, or -1."""
        if state == DEAD or not 0 <= token < len(self.class_of_token):
            return DEAD
        return int(self.delta[state, self.class_of_token[token]])

    def check_budget(self, max_new_tokens: int) -> None:
        """Raise a QueryError if no text of at most `max_new_tokens` tokens satisfies the constraint."""
        needed = int(self.distance[0])
        if needed >= 1 << 40:
            raise QueryError("no text meets the constraint with the tokens of this model; relax it")
        if needed > max_new_tokens:
            raise QueryError(
                f"the constraint needs at least {needed} tokens with the end token, max_new_tokens is {max_new_tokens}; "
                "raise it or relax the constraint"
            )


def token_automaton(
    text: ByteAutomaton, token_bytes: Sequence[bytes | None], eos_ids: Sequence[int]
) -> TokenAutomaton:
    """Convert an automaton over bytes to one over tokens. O(states * bytes of all tokens). None marks tokens without text."""
    eos = sorted(set(eos_ids))
    if not eos or min(eos) < 0 or max(eos) >= len(token_bytes):
        raise QueryError(f"end tokens {eos} are not ids of a vocabulary of {len(token_bytes):,} tokens")
    pieces = [None if token in eos else piece for token, piece in enumerate(token_bytes)]
    lengths = np.array([len(piece or b"") for piece in pieces], dtype=np.int64)
    flat = np.frombuffer(b"".join(piece or b"" for piece in pieces), dtype=np.uint8)
    moves = _walk(text.delta.astype(np.int32), flat, np.concatenate([[0], lengths.cumsum()]))  # (V, Q)
    final = text.num_states
    moves[lengths == 0] = DEAD  # a token without text would allow endless texts
    moves[eos] = np.where(text.accept, final, DEAD)
    # tokens of one class have equal rows; hashing is much faster than sorting long rows
    number: dict[bytes, int] = {}  # only distinct rows are held twice
    class_of_token = np.array([number.setdefault(row.tobytes(), len(number)) for row in moves], dtype=np.int32)
    _, first = np.unique(class_of_token, return_index=True)
    delta = np.vstack([moves[first].T, np.full((1, len(first)), DEAD, dtype=np.int32)])
    return _trimmed(TokenAutomaton(np.ascontiguousarray(delta), class_of_token, final))


def _trimmed(automaton: TokenAutomaton) -> TokenAutomaton:
    """Drop states that tokens cannot reach or that cannot end, merge equal rows (Moore), and recompute the classes."""
    alive = automaton.distance < 1 << 40
    delta = np.where((automaton.delta >= 0) & alive[automaton.delta], automaton.delta, DEAD)
    sink = automaton.num_states
    moves = np.vstack([np.where(delta >= 0, delta, sink), np.full((1, delta.shape[1]), sink)])
    kind = np.zeros(sink + 1, dtype=np.int64)
    kind[[automaton.final, sink]] = 1, 2
    block = equivalent(kind, moves)
    dead = int(block[sink])
    _, representative = np.unique(block, return_index=True)
    table = block[moves[representative]]
    order, seen = [int(block[0])], {int(block[0])}
    for state in order:
        for following_state in np.unique(table[state]).tolist():
            if following_state != dead and following_state not in seen:
                seen.add(following_state)
                order.append(following_state)
    final = int(block[automaton.final])
    order = [state for state in order if state != final] + [final]
    number = np.full(len(representative), DEAD, dtype=np.int32)
    number[order] = np.arange(len(order))
    columns, class_of_class = np.unique(number[table[order]], axis=1, return_inverse=True)
    merged = class_of_class.reshape(-1)[automaton.class_of_token].astype(np.int32)
    return TokenAutomaton(np.ascontiguousarray(columns), merged, len(order) - 1)


@numba.njit(nogil=True, cache=True)
def _walk(delta: np.ndarray, flat: np.ndarray, offset: np.ndarray) -> np.ndarray:
    num_states, num_tokens = delta.shape[0], len(offset) - 1
    moves = np.empty((num_tokens, num_states), dtype=np.int32)
    for token in range(num_tokens):
        for start in range(num_states):
            state = start
            for i in range(offset[token], offset[token + 1]):
                state = delta[state, flat[i]]
                if state < 0:
                    break
            moves[token, start] = state
    return moves


def token_bytes(tokenizer: Tokenizer, vocab_size: int | None = None) -> list[bytes | None]:
    """Return the bytes that each token id adds to the text; None for special tokens and unused ids.

    Supports byte-level BPE (GPT-2, Llama 3, SmolLM, Qwen) and SentencePiece with byte fallback (Llama 2, Gemma).
    """
    vocab = tokenizer.get_vocab()
    size = max(max(vocab.values()) + 1, vocab_size or 0)
    special = set(tokenizer.all_special_ids)
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special |= {token for token, entry in added.items() if getattr(entry, "special", False)}
    plain = {token: text for text, token in vocab.items() if token not in special}
    byte_of_letter = byte_of_character()
    ordinary = {token: text for token, text in plain.items() if token not in added}
    byte_level = all(letter in byte_of_letter for text in ordinary.values() for letter in text)
    if not byte_level and not any("\u2581" in text for text in ordinary.values()):
        raise ConfigError(
            "the tokenizer is neither byte-level BPE nor SentencePiece; the bytes of its tokens are unknown"
        )
    result: list[bytes | None] = [None] * size
    for token, text in plain.items():
        fallback = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
        if token in added:
            result[token] = text.encode()
        elif byte_level:
            result[token] = bytes(byte_of_letter[letter] for letter in text)
        elif fallback:
            result[token] = bytes([int(fallback[1], 16)])
        else:
            result[token] = text.replace("\u2581", " ").encode()
    _check_bytes(tokenizer, result)
    return result


def _check_bytes(tokenizer: Tokenizer, pieces: list[bytes | None]) -> None:
    """Raise a ConfigError unless the tokens of a known text spell that text."""
    text = "It cost 3 euros, didn't it?"
    written = b"".join(pieces[token] or b"" for token in tokenizer.encode(text, add_special_tokens=False))
    if written.strip() != text.encode():
        raise ConfigError(
            f"the tokenizer changes the text it reads ({text!r} became {written!r}); steering needs one that preserves it"
        )

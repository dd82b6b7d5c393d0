"""Choose default settings by the size of the text.

The number of states follows from the number of training tokens, and all other settings from both. Each choice has a
reason, which `train` prints. The measurements behind them are in docs/defaults.md and paper/log/.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlhmm.config import assign, dotted_names, from_dict, override, to_dict
from vlhmm.data.corpora import Corpus
from vlhmm.data.prepared import PreparedText
from vlhmm.errors import ConfigError
from vlhmm.training.config import RunConfig
from vlhmm.training.presets import preset
from vlhmm.training.run_folder import RunFolder

TOKENS_PER_STATE = 96  # the text supports a state by so many tokens ...
LEAST_TOKENS_PER_STATE = 8  # ... and with fewer than these most states have nothing to learn from
FEWEST_STATES, MOST_STATES = 2**6, 2**14  # by default: minutes on two cores
TOKENS_FOR_LESS_DROPOUT = 60  # per state
MOST_STATES_FOR_LESS_DROPOUT = 2**13
PREDICTABLE = 10  # perplexity of a bigram model: below, a text (of events, of machine code) is learned by heart, not overfitted
STATES_PER_BLOCK = 32
MOST_BLOCKS = 256
ITERATIONS, ITERATIONS_OF_SMALL = 100, 200
SMALL_TEXT = 1_000_000  # tokens: below, an iteration takes a second or two
E_STEP_TOKENS = 1_000_000  # of a longer text; up to 1.5 million tokens an E-step reads all of it


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting, its value, and why it has this value."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.reason}"


def power_of_two(value: float, least: int, most: int) -> int:
    """Return the power of two nearest to `value` on a log scale, within bounds."""
    return min(most, max(least, 2 ** round(math.log2(max(1.0, value)))))


def choose(
    num_tokens: int,
    vocab_size: int,
    given: Mapping[str, Any],
    in_parts: bool = False,
    bigram_perplexity: float | None = None,
) -> list[Choice]:
    """Choose what is not among the `given` settings (dotted names and values) for a text of so many tokens.

    A prepared text is only ever read `in_parts`. Without the perplexity of a bigram model the text counts as prose.
    """
    chosen: list[Choice] = []

    def value(name: str, otherwise: Any, reason: str) -> Any:
        if name in given:
            return given[name]
        chosen.append(Choice(name, otherwise, reason))
        return otherwise

    constrained = given.get("model.constraint", "brown") in ("brown", "frequency")
    states = power_of_two(num_tokens / TOKENS_PER_STATE, FEWEST_STATES, MOST_STATES)
    if "model.num_blocks" in given and states % given["model.num_blocks"]:
        states = max(1, round(states / given["model.num_blocks"])) * given["model.num_blocks"]
    capped = num_tokens / TOKENS_PER_STATE > 1.4 * MOST_STATES
    states = value(
        "model.num_states",
        states,
        "the most that trains in minutes; more may be better: --states"
        if capped
        else f"about {TOKENS_PER_STATE} of {num_tokens:,} tokens per state",
    )
    blocks = 1
    if constrained:
        blocks = blocks_for(states, vocab_size)
        blocks = value(
            "model.num_blocks", blocks, f"{states / blocks:g} states per block on average, {vocab_size:,} words"
        )
        # shares are multiples of 8 states: where a block has fewer than 16 there is nothing to share out
        uneven = states % 8 == 0 and states >= 16 * blocks
        if uneven:
            value("model.allocation", "tokens", "more states where more tokens are")
    if given.get("model.parameterization", "neural") == "neural":
        value("model.embedding", "independent", "each state has its own embedding")
        dropped = embedding_dropout(num_tokens / states)
        value("training.embedding_dropout", dropped, f"{num_tokens / states:.0f} tokens per state")
    if given.get("training.optimizer", "adamw") == "adamw":
        rate, reason = state_dropout(num_tokens / states, states)
        if rate < 0.5 and bigram_perplexity is not None and bigram_perplexity < PREDICTABLE:
            reason = f"a predictable text: a bigram model has perplexity {bigram_perplexity:.1f}"
            rate = 0.1
            value("training.weight_decay", 0.5, reason)
            if given.get("training.method", "em") == "em":
                value("training.m_step_updates", 6, reason)
        value("training.state_dropout", rate, reason)
    if not given.get("distillation.weight") and not in_parts:
        value("training.unknown_words", "held-out", "rare words stand in for unseen ones, where the text has no <unk>")
    choose_iterations(num_tokens, given, value, in_parts)
    return chosen


def blocks_for(states: int, vocab_size: int) -> int:
    """Return the number of blocks for so many states and words: a divisor of the states, at most two thirds of the words."""
    most = max(1, min(MOST_BLOCKS, states // STATES_PER_BLOCK, vocab_size * 2 // 3))
    return next(blocks for blocks in range(most, 0, -1) if states % blocks == 0)


def embedding_dropout(tokens_per_state: float) -> float:
    """Return the rate: 0.35 at 28 tokens per state, 0.1 less for each doubling, rounded to a multiple of 0.05."""
    return round(20 * min(0.35, max(0.0, 0.35 - 0.1 * math.log2(max(1.0, tokens_per_state) / 28)))) / 20


def state_dropout(tokens_per_state: float, states: int) -> tuple[float, str]:
    """Return the rate and its reason: 0.25 if the states have enough tokens to be fitted well, else 0.5.

    A step costs the square of the states that are kept, so that large models are left at 0.5.
    """
    if tokens_per_state < TOKENS_FOR_LESS_DROPOUT:
        return 0.5, f"{tokens_per_state:.0f} tokens per state"
    if states > MOST_STATES_FOR_LESS_DROPOUT:
        return 0.5, "0.25 would take twice the time"
    return 0.25, f"{tokens_per_state:.0f} tokens per state"


def choose_iterations(num_tokens: int, given: Mapping[str, Any], value: Any, in_parts: bool) -> None:
    """Choose epochs, and E-steps on parts of a long text."""
    if given.get("training.method", "em") != "em":
        return
    e_steps = 1
    if in_parts or (num_tokens >= 1.5 * E_STEP_TOKENS and not given.get("distillation.weight")):
        e_tokens = value("training.em_tokens", E_STEP_TOKENS, "tokens per E-step: the text is read in parts")
        e_steps = 1 if e_tokens is None else max(1, math.ceil(num_tokens / e_tokens))
        if e_steps > 1:
            value("training.checks_per_epoch", e_steps / 10, "a validation every 10 E-steps")
    iterations = ITERATIONS_OF_SMALL if num_tokens < SMALL_TEXT else ITERATIONS
    epochs = max(1.0, round(iterations / e_steps, 1)) if e_steps > 1 else float(iterations)
    value("training.epochs", epochs, f"{math.ceil(epochs * e_steps)} E-steps in all")


def warnings_for(num_tokens: int, num_states: int) -> Collection[str]:
    """Return warnings about the number of states for such a text."""
    if num_states * LEAST_TOKENS_PER_STATE <= num_tokens:
        return []
    return [
        f"{num_states:,} states outnumber what {num_tokens:,} training tokens support (fewer than "
        f"{LEAST_TOKENS_PER_STATE} tokens per state); about "
        f"{power_of_two(num_tokens / TOKENS_PER_STATE, FEWEST_STATES, MOST_STATES):,} states are likely to do better"
    ]


class Configured(NamedTuple):
    """A configuration, and what of it was chosen."""

    config: RunConfig
    choices: list[Choice]


def configure(
    named: Sequence[str],
    num_tokens: int,
    vocab_size: int,
    in_parts: bool = False,
    bigram_perplexity: float | None = None,
) -> Configured:
    """Return the default preset with the `named` settings (a.b=c), and the others chosen for a text of so many tokens."""
    base = to_dict(preset("default"))
    given: dict[str, Any] = {}
    known = dotted_names(preset("default"))
    for assignment in named:
        name, _, text = assignment.partition("=")
        alone = to_dict(preset("default"))
        assign_checked(alone, assignment, known)
        group, _, field = name.rpartition(".")
        given[name] = (alone[group] if group else alone)[field]
    choices = choose(num_tokens, vocab_size, given, in_parts, bigram_perplexity)
    for name, value in [*((c.name, c.value) for c in choices), *given.items()]:
        group, _, field = name.rpartition(".")
        (base[group] if group else base)[field] = value
    return Configured(from_dict(RunConfig, base), choices)


def assign_checked(values: dict[str, Any], assignment: str, known: list[str]) -> None:
    """Set one a.b=c in nested values; an unknown name or a value of another type is refused."""
    name, equals, text = assignment.partition("=")
    if not equals:
        raise ConfigError(f"--set takes name=value, got {assignment!r}")
    assign(RunConfig, values, name, text, known)


def stored_settings(out: str | Path | None, named: Sequence[str]) -> RunConfig | None:
    """Return the configuration of the run in folder `out` with the `named` settings; None if there is no run."""
    if out is None or not Path(out).is_dir() or not RunFolder(out).exists():
        return None
    return override(RunFolder(out).config()[0], list(named))


def configure_for(named: Sequence[str], corpus: Corpus) -> Configured:
    """Return the default preset with the `named` settings, and the others chosen for a corpus."""
    in_parts = isinstance(corpus.train, PreparedText)
    return configure(named, corpus.train.num_tokens, len(corpus.vocabulary), in_parts, bigram_perplexity(corpus))


def bigram_perplexity(corpus: Corpus) -> float | None:
    """Return the perplexity of the validation text under a bigram model of the training text; None for a prepared text.

    Absolute discounting of 0.75, interpolated with unigrams: how predictable a text is, in O(N log N), a second for 10^7 tokens.
    """
    if isinstance(corpus.train, PreparedText):
        return None
    size, discount = len(corpus.vocabulary), 0.75
    text, valid = (np.asarray(part.tokens, dtype=np.int64) for part in (corpus.train, corpus.valid))
    pairs, counts = np.unique(text[:-1] * size + text[1:], return_counts=True)
    left = np.bincount(text[:-1], minlength=size)  # how often a word is left, and for how many different ones
    followers = np.bincount(pairs // size, minlength=size)
    unigram = (np.bincount(text, minlength=size) + 1) / (len(text) + size)
    before, words = valid[:-1], valid[1:]
    where = np.minimum(np.searchsorted(pairs, before * size + words), len(pairs) - 1)
    seen = np.where(pairs[where] == before * size + words, counts[where] - discount, 0.0)
    total = np.maximum(left[before], 1)
    kept_back = np.where(left[before] > 0, discount * followers[before] / total, 1.0)
    return float(np.exp(-np.log(seen / total + kept_back * unigram[words]).mean()))

r"""Interpolated modified Kneser-Ney. Input: a `Text`. Output: `KneserNey`, a `LanguageModel` of any order.

With a(c w) the adjusted count of word w after context c, h the context c without its first word, and n_j the
number of n-grams of an order whose adjusted count is j:

    p(w | c)  = (a(c w) - D(a(c w))) / a(c .) + gamma(c) p(w | h)
    gamma(c)  = sum_w D(a(c w)) / a(c .)
    D(j)      = j - (j + 1) Y n_{j+1} / n_j for j = 1, 2 and 3 (3 for all above), Y = n_1 / (n_1 + 2 n_2)

The recursion ends in the uniform distribution 1 / V over the vocabulary, so that p(. | c) sums to one over
exactly the words this model shares with every other. a is the plain count at the highest order and for
n-grams that begin with the sentence start <s>; else the number of different words (or <s>) seen to the left
of the n-gram. <unk> is an ordinary word, <eos> ends every sentence and is predicted, <s> begins it and is
not. Nothing is pruned.

Where the counts of counts allow no discounts (tiny or very regular texts: an n_j is zero, or a D(j) falls
outside (0, j]), an order takes D = 0.5, 1, 1.5, as lmplz's --discount_fallback does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vlhmm.baselines import arpa
from vlhmm.baselines.ngram_sampling import sample_text
from vlhmm.baselines.ngrams import Level, distribution, look_up
from vlhmm.baselines.runs import Run, read_run, read_tensors, write_run, write_tensors
from vlhmm.data.checked import check_keys, number_in
from vlhmm.data.text import Text
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import CheckpointError, ConfigError, DataError, QueryError
from vlhmm.limits import shortened

MAX_ORDER = 1000
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)


@dataclass(eq=False)
class KneserNey:
    """A back-off n-gram model as a `LanguageModel`; the carry is each row's last order-1 words, (B, order-1).

    It was estimated on sentences. An <eos> in a context therefore means the sentence start: after a line end
    the next line is scored as a new sentence, and the rules `reset` and `carry` differ only where a stream
    begins mid-line.
    """

    vocabulary: Vocabulary
    levels: tuple[Level, ...]  # order n at index n - 1
    discounts: tuple[tuple[float, ...], ...] | None = None  # D(1), D(2), D(3+) an order, where estimated here

    @property
    def order(self) -> int:
        return len(self.levels)

    @property
    def rule(self) -> str:
        """The context rule it was estimated under."""
        return "reset"

    @property
    def fallback_orders(self) -> list[int]:
        """Orders for which no discounts can be estimated, so that 0.5, 1 and 1.5 are used."""
        return [n for n, found in enumerate(self.discounts or (), start=1) if tuple(found) == FALLBACK_DISCOUNTS]

    @property
    def num_ngrams(self) -> int:
        """Number of n-grams of all orders that have a probability."""
        return sum(len(level.keys) for level in self.levels) - 1  # <s> alone is never predicted

    @property
    def num_parameters(self) -> int:
        """Number of probabilities, and of back-off weights below the highest order, <s> included."""
        return self.num_ngrams + sum(len(level.keys) for level in self.levels[:-1])

    def start(self, batch_size: int) -> Tensor:
        """Return the sentence start, `batch_size` times."""
        return torch.full((batch_size, self.order - 1), len(self.vocabulary), dtype=torch.int64)

    def score_batch(self, tokens: Tensor, lengths: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(x_t | x_<t), float64 (B, T), zero beyond `lengths`; and each row's last order-1 words."""
        _, time = tokens.shape
        inside = np.arange(time) < lengths.cpu().numpy()[:, None]
        words = np.where(inside, tokens.cpu().numpy(), 0)
        self._check(words)
        words = np.concatenate([carry.numpy(), words], axis=1)
        log_prob = look_up(self.levels, words, self.vocabulary.eos)[:, self.order - 1 :]
        last = lengths.cpu().numpy()[:, None] + np.arange(self.order - 1)
        carry = torch.from_numpy(np.take_along_axis(words, last, axis=1))
        return torch.from_numpy(np.where(inside, log_prob, 0.0)), carry

    def next_word_probabilities(self, carry: Tensor) -> Tensor:
        """Return p(x | text so far) of every word x, float64 (B, V); O(V) for every distinct context."""
        found: dict[tuple[int, ...], np.ndarray] = {}
        rows = []
        for row in carry.tolist():
            key = tuple(row)
            if key not in found:
                found[key] = self._distribution(np.asarray(row, dtype=np.int64))
            rows.append(found[key])
        return torch.from_numpy(np.stack(rows))

    def _distribution(self, words: np.ndarray) -> np.ndarray:
        """Return p(. | words), where an <eos> or <s> among the words begins a sentence."""
        begins = np.flatnonzero((words == self.vocabulary.eos) | (words == len(self.vocabulary)))
        if len(begins):
            words = words[begins[-1] :].copy()
            words[0] = len(self.vocabulary)
        return distribution(self.levels, words)

    def _check(self, words: np.ndarray) -> None:
        if words.size and not 0 <= words.min() <= words.max() < len(self.vocabulary):
            raise QueryError(
                f"word ids run from {words.min()} to {words.max()}, expected 0 to "
                f"{len(self.vocabulary) - 1}; encode the text with this model's vocabulary"
            )

    def sample(
        self, num_tokens: int, generator: torch.Generator, *, progress: Callable[[int, int], None] = lambda _, __: None
    ) -> Text:
        """Return whole lines that the model writes, about `num_tokens` tokens with their <eos>; seconds per million."""
        return sample_text(self.levels, self.vocabulary.eos, num_tokens, generator, progress)

    def write_arpa(self, path: str | Path) -> None:
        """Write the model to `path` in ARPA format, compressed if it ends in .gz."""
        arpa.write(path, self.vocabulary, self.levels)

    @classmethod
    def read_arpa(cls, path: str | Path) -> "KneserNey":
        """Return the model in an ARPA file, plain or gzip; ids in the order of the file's unigrams."""
        return cls(*arpa.read(path))


def estimate(text: Text, vocabulary: Vocabulary, order: int = 5) -> KneserNey:
    """Return the interpolated modified Kneser-Ney model of N tokens, in O(order N log N): half a second for PTB."""
    if order < 1:
        raise ConfigError(f"n-gram order is {order}, expected at least 1")
    if not text.num_tokens:
        raise DataError("cannot estimate an n-gram model from an empty text, expected at least one line")
    if not 0 <= text.tokens.min() <= text.tokens.max() < len(vocabulary):
        raise DataError(
            f"text has word ids up to {text.tokens.max()}, expected below {len(vocabulary)}; "
            f"encode it with the vocabulary given"
        )
    counts = _count(text, len(vocabulary), order)
    adjusted = [_adjusted(counts, n) for n in range(order)]
    adjusted[0][-1] = 0  # <s> is never predicted

    levels: list[Level] = []
    discounts = []
    prob = np.array([1.0 / len(vocabulary)])
    for n, (ngrams, a) in enumerate(zip(counts, adjusted, strict=True)):
        discount = _discounts(a)
        discounts.append(discount)
        taken = np.array([0.0, *discount])[np.minimum(a, 3)]
        context = ngrams.keys // (len(vocabulary) + 1) if n else np.zeros_like(a)
        total = np.bincount(context, weights=a, minlength=len(prob))
        reserved = np.bincount(context, weights=taken, minlength=len(prob))
        # A context that nothing follows (a sentence's end) leaves all to the shorter one.
        gamma = np.where(total > 0, reserved, 1.0) / np.where(total > 0, total, 1.0)
        if n:
            levels[-1] = levels[-1]._replace(log_backoff=np.log(gamma))
        prob = (a - taken) / total[context] + gamma[context] * prob[ngrams.suffix]
        if n == 0:
            prob[-1] = 0.0
        with np.errstate(divide="ignore"):  # log p(<s>) = -inf
            levels.append(Level(ngrams.keys, np.log(prob), np.zeros_like(prob)))
    return KneserNey(vocabulary, tuple(levels), tuple(discounts))


@dataclass(frozen=True)
class _Ngrams:
    """The different n-grams of one order in a text."""

    keys: np.ndarray  # (n,) int64, see vlhmm.baselines.ngrams
    count: np.ndarray  # (n,) int64
    suffix: np.ndarray  # (n,) int64: index, an order below, of the n-gram without its first word
    begins: np.ndarray  # (n,) bool: its first word is <s>


def _count(text: Text, vocab_size: int, order: int) -> list[_Ngrams]:
    """Return the n-grams of orders 1 to `order` of the sentences, with one <s> in front of each; none spans two."""
    width = vocab_size + 1
    lengths = np.diff(text.offsets)
    words = np.insert(text.tokens.astype(np.int64), text.offsets[:-1], vocab_size)
    sentence_start = np.repeat(text.offsets[:-1] + np.arange(len(lengths)), lengths + 1)
    depth = np.arange(len(words)) - sentence_start  # words since <s>, which has depth 0

    every_word = np.arange(width)
    unigrams = np.bincount(words, minlength=width)
    nothing = np.zeros(width, dtype=np.int64)
    counts = [_Ngrams(every_word, unigrams, nothing, every_word == vocab_size)]
    index = words  # of the n-gram that ends here; garbage where depth < n - 1
    for n in range(2, order + 1):
        ends = np.flatnonzero(depth >= n - 1)
        keys, inverse, count = np.unique(index[ends - 1] * width + words[ends], return_inverse=True, return_counts=True)
        at = np.empty(len(keys), dtype=np.int64)
        at[inverse] = ends  # where each n-gram ends, once
        counts.append(_Ngrams(keys, count, index[at], depth[at] == n - 1))
        index = np.full(len(words), -1, dtype=np.int64)
        index[ends] = inverse
    return counts


def _adjusted(counts: list[_Ngrams], n: int) -> np.ndarray:
    """Return a(.) of the n-grams at `counts[n]`."""
    ngrams = counts[n]
    if n == len(counts) - 1:
        return ngrams.count.copy()
    extended_left = np.bincount(counts[n + 1].suffix, minlength=len(ngrams.keys))
    return np.where(ngrams.begins, ngrams.count, extended_left)


def _discounts(adjusted: np.ndarray) -> tuple[float, float, float]:
    """Return D(1), D(2), D(3+) from the counts of counts, or the fallback."""
    n = np.bincount(np.minimum(adjusted, 5), minlength=5)[:5].tolist()
    if not all(n[1:4]):
        return FALLBACK_DISCOUNTS
    y = n[1] / (n[1] + 2 * n[2])
    d1, d2, d3 = (j - (j + 1) * y * n[j + 1] / n[j] for j in (1, 2, 3))
    # Zero would let a context give its shorter context nothing, and an unseen word probability zero.
    return (d1, d2, d3) if 0 < d1 <= 1 and 0 < d2 <= 2 and 0 < d3 <= 3 else FALLBACK_DISCOUNTS


def save(model: KneserNey, folder: str | Path) -> None:
    """Write the model to a run folder, exactly."""
    tensors = {
        f"{n}.{name}": torch.from_numpy(array)
        for n, level in enumerate(model.levels, start=1)
        for name, array in level._asdict().items()
    }
    if (Path(folder) / "config.json").exists() and (kind := read_run(folder).kind) != "kn":
        raise ConfigError(f"{folder} holds a run of kind {kind}, got kn; choose another folder")
    write_tensors(Path(folder) / "model.safetensors", tensors)
    settings = {"order": model.order, "discounts": model.discounts}
    write_run(folder, Run("kn", settings, model.vocabulary))


def load(folder: str | Path, run: Run) -> KneserNey:
    """Return the model in a run folder of kind kn; `run` is what `read_run` found in it."""
    path = Path(folder) / "model.safetensors"
    tensors, _ = read_tensors(path)
    config = Path(folder) / "config.json"
    check_keys(config, run.settings, ("order", "discounts"), "settings.")
    order = int(number_in(config, run.settings, "order", 1, MAX_ORDER, whole=True, where="settings."))
    discounts = run.settings.get("discounts")
    if discounts is not None and not (
        isinstance(discounts, list)
        and len(discounts) == order
        and all(isinstance(row, list) and len(row) == 3 for row in discounts)
        and all(type(d) in (int, float) and 0 <= d <= 3 for row in discounts for d in row)
    ):
        raise CheckpointError(f"{config}: settings.discounts is {shortened(discounts)}, expected three numbers an order")
    names = [f"{n}.{name}" for n in range(1, order + 1) for name in Level._fields]
    if sorted(names) != sorted(tensors):
        raise CheckpointError(f"{path} is not the {order}-gram model that config.json describes; restore it")
    levels: list[Level] = []
    for n in range(1, order + 1):
        level = Level(*(tensors[f"{n}.{name}"].numpy() for name in Level._fields))
        _check_level(path, n, level, levels[-1] if levels else None, len(run.vocabulary) + 1)
        levels.append(level)
    return KneserNey(run.vocabulary, tuple(levels), tuple(map(tuple, discounts)) if discounts else None)


def _check_level(path: Path, n: int, level: Level, below: Level | None, width: int) -> None:
    """Raise a CheckpointError unless `estimate` or `read_arpa` could have made the tables."""

    def damaged(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged: its {n}-grams {why}; restore it or make it again")

    for name, array in level._asdict().items():
        wanted = np.int64 if name == "keys" else np.float64
        if array.ndim != 1 or array.dtype != wanted or len(array) != len(level.keys):
            raise damaged(f"have {name} of shape {array.shape} and type {array.dtype}")
    keys = level.keys
    if below is None:
        if len(keys) != width:
            raise CheckpointError(f"{path} and vocabulary.txt do not belong together: they differ in size")
        if not np.array_equal(keys, np.arange(width)):
            raise damaged("have other keys than the words")
    elif len(keys) and (keys[0] < 0 or keys[-1] >= len(below.keys) * width or not (keys[1:] > keys[:-1]).all()):
        raise damaged("are not sorted, or continue none of the shorter ones")
    if not (level.log_prob <= 1e-9).all():  # which what is no number fails too
        raise damaged("have probabilities above one")
    if not np.isfinite(level.log_backoff).all():
        raise damaged("have back-off weights that are not finite")

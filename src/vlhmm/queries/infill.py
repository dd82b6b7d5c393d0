"""Gaps filled given both sides. Input: a text with [MASK]s. Output: exact fills, the best one, or marginals.

What is answered: p(fill | every given word, every gap's range of lengths, the constraint), where a fill is
what each gap holds. A gap holds no <eos> unless it is allowed to; by default the text ends with an <eos>
otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from vlhmm.constraints.automaton import Automaton, free, with_free_state
from vlhmm.constraints.constraint import Constraint, compile_constraint
from vlhmm.data.user_text import DEFAULT_MEMORY, Seed, check_sample_memory, generator_of
from vlhmm.errors import QueryError
from vlhmm.lattice.backward import BackwardLattice, backward
from vlhmm.lattice.forward import GapMarginals, gap_marginals
from vlhmm.lattice.sampling import Best, Draw, fills
from vlhmm.lattice.semiring import MaxProduct, SumProduct
from vlhmm.lattice.template import (
    Fixed,
    Gap,
    InfillTemplate,
    Item,
    check_memory,
    make_template,
    parse_template,
    with_end,
)
from vlhmm.queries.next_word import WordDistribution
from vlhmm.queries.score import score_ids
from vlhmm.results import Result

if TYPE_CHECKING:
    from vlhmm.language_model import HMMLanguageModel

Scope = Literal["text", "gaps"]


@dataclass(frozen=True, slots=True)
class Fill(Result):
    """One way to fill the gaps."""

    text: str  # the whole text with its gaps filled
    gaps: tuple[tuple[str, ...], ...]  # what each gap holds
    log_prob: float  # log p(fill | given words, gap lengths in range, constraint), nats; over all state paths
    ids: tuple[int, ...]  # the whole text, its <eos> included if it was asked for


@dataclass(frozen=True, slots=True)
class BestFill(Result):
    """The best fill, and in which sense it is the best."""

    fill: Fill
    criterion: str  # "most probable word" or "joint path"
    path_log_prob: float | None  # of the joint path: log p(fill, states | given words, gap lengths in range, constraint)


@dataclass(frozen=True, slots=True)
class GapDistribution(Result):
    """One gap, given the words, the ranges of all gaps and the constraint."""

    lengths: dict[int, float]
    words: dict[int, list[WordDistribution]]  # {length: a distribution for each place}


@dataclass(frozen=True, eq=False, repr=False)
class Infilling:
    """A text with gaps, ready to be asked: its messages are computed once."""

    model: "HMMLanguageModel"
    template: InfillTemplate
    words: tuple[str, ...]  # as written, gaps included
    scope: Scope
    memory: float
    log_evidence: float  # log p(given words, gaps in range), nats
    log_constraint: float | None  # log p(constraint | given words, gaps in range)
    _lattice: BackwardLattice
    _start: int

    def __repr__(self) -> str:
        return f"Infilling({' '.join(self.words)!r}, log_evidence={self.log_evidence:.4f}, log_constraint={self.log_constraint})"

    def sample(self, n: int = 1, seed: Seed = 0) -> list[Fill]:
        """Return `n` independent draws from p(fill | given words, gap lengths in range, constraint)."""
        if n < 1:
            raise QueryError(f"asked for {n} samples, expected at least 1")
        words = sum(item.high for item in self.template.items if isinstance(item, Gap))
        check_sample_memory(n, words, self.memory, self.model.distributions.states_per_block)
        found = fills(self._lattice, self._start, n, Draw(generator_of(seed)))
        return self._fills(found)

    def best(self) -> BestFill:
        """Return the most probable word of a single one-word gap; else the fill on the single most probable path.

        The most probable fill of a longer gap sums over state paths inside a maximum over words, which no
        known algorithm does efficiently: the path's fill is what can be had exactly, and it is called that.
        """
        gaps = [item for item in self.template.items if isinstance(item, Gap)]
        if gaps == [Gap(1, 1)]:
            words = gap_marginals(self._lattice, self._start)[0].words[1][0]
            return BestFill(self._fills([[[int(words.argmax())]]])[0], "most probable word", None)
        distributions = self.model.distributions
        lattice = backward(distributions, self.template, MaxProduct(distributions))
        found = fills(lattice, self._start, 1, Best())
        log_path = lattice.log_total(self._start) - self._log_total
        return BestFill(self._fills(found)[0], "joint path", log_path)

    def marginals(self) -> list[GapDistribution]:
        """Return each gap's length and, given its length, the distribution of each of its words."""
        return [self._distribution(found) for found in gap_marginals(self._lattice, self._start)]

    def log_prob(self, *gaps: str | Sequence[str]) -> float:
        """Return log p(fill | given words, gap lengths in range, constraint) of one text per gap; -inf if not allowed."""
        wanted = [self.model.vocabulary.split(words) if isinstance(words, str) else list(words) for words in gaps]
        slots = [item for item in self.template.items if isinstance(item, Gap)]
        if len(wanted) != len(slots):
            raise QueryError(f"the text has {len(slots)} gaps, got words for {len(wanted)}")
        vocabulary = self.model.vocabulary
        ids = [[vocabulary.id_of.get(word, vocabulary.unk) for word in words] for words in wanted]
        for slot, words in zip(slots, ids, strict=True):
            if not slot.low <= len(words) <= slot.high or (vocabulary.eos in words and not self.template.allow_eos):
                return -math.inf
        if not self.template.automaton.accept[self._run(ids)]:
            return -math.inf
        return self._share(self._whole(ids))

    @property
    def _log_total(self) -> float:
        return self.log_evidence + (self.log_constraint or 0.0)

    def _share(self, ids: tuple[int, ...]) -> float:
        """Return log p(text | observed, constraint): at most 0, whatever rounding says of a text that is certain."""
        return min(0.0, score_ids(self.model, ids) - self._log_total)

    def _run(self, gaps: list[list[int]]) -> int:
        """Return the automaton's state after the text with these gaps."""
        state, gap = np.array([self._start]), iter(gaps)
        for item in self.template.items:
            if isinstance(item, Fixed):
                state = self.template.step(state, item)
            else:
                for word in next(gap):
                    state = self.template.automaton.delta[state, self.template.automaton.class_of_word[word]]
        return int(state[0])

    def _whole(self, gaps: list[list[int]]) -> tuple[int, ...]:
        """Return the ids of the text with these gaps."""
        gap, whole = iter(gaps), []
        for item in self.template.items:
            whole += [item.word] if isinstance(item, Fixed) else next(gap)
        return tuple(whole)

    def _fills(self, found: list[list[list[int]]]) -> list[Fill]:
        names = self.model.vocabulary.words
        known: dict[tuple[tuple[int, ...], ...], Fill] = {}
        result = []
        for gaps in found:
            key = tuple(map(tuple, gaps))
            if key not in known:
                texts = tuple(tuple(names[word] for word in words) for words in gaps)
                gap = iter(texts)
                written: list[str] = []
                for item, word in zip(self.template.items, self.words, strict=True):
                    written += [word] if isinstance(item, Fixed) else next(gap)
                if self.template.items and self.template.items[-1] == Fixed(self.model.vocabulary.eos, read=False):
                    written.pop()
                ids = self._whole(gaps)
                known[key] = Fill(self.model.vocabulary.join(written), texts, self._share(ids), ids)
            result.append(known[key])
        return result

    def _distribution(self, found: GapMarginals) -> GapDistribution:
        words = {n: [WordDistribution(self.model.vocabulary, row) for row in table] for n, table in found.words.items()}
        return GapDistribution(found.lengths, words)


def prepare(
    model: "HMMLanguageModel",
    text: str | Sequence[str],
    constraint: Constraint | None = None,
    scope: Scope = "text",
    eos: bool = True,
    allow_eos: bool = False,
    memory: float = DEFAULT_MEMORY,
) -> Infilling:
    """Return the text's gaps, their messages computed.

    `scope` says whether the constraint applies to the whole text, or only to the words of the gaps, one gap after the
    other.
    """
    items, words = parse_template(model.vocabulary, text)
    if not any(isinstance(item, Gap) for item in items):
        raise QueryError("the text has no gap; write [MASK] for a word, [MASK:a-b] for a to b words, between blanks")
    items, words = with_end(items, words, model.vocabulary, eos)
    return prepare_items(model, items, words, constraint, scope, allow_eos, memory)


def prepare_items(
    model: "HMMLanguageModel",
    items: list[Item],
    words: list[str],
    constraint: Constraint | Automaton | None,
    scope: Scope,
    allow_eos: bool,
    memory: float,
) -> Infilling:
    """Return the same for items that are parsed already; `words` names them. A constraint may be compiled already too."""
    distributions, vocabulary = model.distributions, model.vocabulary
    if scope not in ("text", "gaps"):
        raise QueryError(f"unknown scope {scope!r}, expected text or gaps")
    if scope == "gaps":
        items = [item._replace(read=False) if isinstance(item, Fixed) else item for item in items]
    if constraint is None:
        automaton, extra = free(len(vocabulary), vocabulary.eos), None
        starts = [automaton.initial]
    else:
        compiled = constraint if isinstance(constraint, Automaton) else compile_constraint(constraint, vocabulary)
        automaton, extra = with_free_state(compiled)
        starts = [automaton.initial, extra]
    template = make_template(distributions, items, automaton, allow_eos, starts)
    if not template.possible(automaton.initial):
        raise QueryError(
            "impossible constraint: no text with these words and gaps satisfies it, whatever the model; "
            "widen the gaps or loosen the constraint"
        )
    check_memory(template, distributions.num_states, memory)
    lattice = backward(distributions, template, SumProduct(distributions))
    log_total = lattice.log_total(automaton.initial)
    log_evidence = log_total if extra is None else lattice.log_total(extra)
    if log_evidence == -math.inf:
        raise QueryError("the given words have probability zero under the model, whatever the gaps hold")
    if log_total == -math.inf:
        raise QueryError("impossible constraint: every text that satisfies it has probability zero under the model")
    log_constraint = None if extra is None else min(0.0, log_total - log_evidence)
    return Infilling(
        model, template, tuple(words), scope, memory, log_evidence, log_constraint, lattice, automaton.initial
    )

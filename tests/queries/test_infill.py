"""Gaps, against writing out every fill: totals, marginals, samples, best paths; constrained and not."""

import math
from collections import Counter

import numpy as np
import pytest
import query_oracle as oracle
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from dense_hmm import DenseModel, oracle_model, random_model
from query_models import MANY, REAL, ids_of, models, real_model
from vlhmm.constraints.constraint import length, must_contain, must_not, regex
from vlhmm.errors import QueryError
from vlhmm.queries.infill import prepare
from vlhmm.queries.sample import constrained, sample

EXACT = dict(rtol=1e-9, atol=1e-12)


class Case:
    """A text with gaps, as the query and as the oracle take it."""

    def __init__(self, model, text, eos=True, allow_eos=False, constraint=None, accepts=None, scope="text"):
        self.model, self.text, self.wishes = model, text, dict(eos=eos, allow_eos=allow_eos, scope=scope)
        self.constraint, self.accepts = constraint, accepts
        words = text.split()
        self.items = []
        for word in words:
            if word.startswith("[MASK"):
                low, _, high = word[6:-1].partition("-") if ":" in word else ("1", "", "")
                self.items.append((int(low), int(high or low)))
            else:
                self.items.append(ids_of(model, [word])[0])
        self.added = eos and words[-1] != "<eos>"
        if self.added:
            self.items.append(model.vocabulary.eos)

    def fills(self, constrained=True):
        return oracle.fills(
            oracle_model(self.model),
            self.items,
            self.wishes["allow_eos"],
            self.accepts if constrained else None,
            self.wishes["scope"],
            unread_end=self.added,
        )

    def prepare(self):
        return prepare(self.model, self.text, self.constraint, **self.wishes)


@st.composite
def cases(draw):
    """Up to four items, gaps among them, of at most four gap words in all; every option on or off."""
    model = draw(models(max_words=2))
    words, room = [], 4
    for _ in range(draw(st.integers(1, 4))):
        if room and draw(st.booleans()):
            low = draw(st.integers(0, min(2, room)))
            high = draw(st.integers(max(1, low), max(1, min(low + 1, room))))
            room -= high
            words.append(f"[MASK:{low}-{high}]")
        else:
            words.append(draw(st.sampled_from((*model.vocabulary.words, "zzz"))))
    assume(any(word.startswith("[") for word in words))
    a, u = ids_of(model, ["a", "<unk>"])
    constraint, accepts = draw(
        st.sampled_from(
            [
                (None, None),
                (must_contain("a"), lambda ids: oracle.contains(ids, [a])),
                (must_not("a <unk>"), lambda ids: not oracle.contains(ids, [a, u])),
                (
                    must_contain("a", "<unk>", in_order=True) | length(0, 2),
                    lambda ids: oracle.contains_in_order(ids, [[a], [u]]) or len(ids) <= 2,
                ),
                (
                    ~regex(". (a|<unk>)* .?") & must_not("<eos>"),
                    lambda ids: (
                        not oracle.matches(f".({oracle.letters([a])}|{oracle.letters([u])})*.?", ids)
                        and model.vocabulary.eos not in ids
                    ),
                ),
            ]
        )
    )
    return Case(
        model,
        " ".join(words),
        eos=draw(st.booleans()),
        allow_eos=draw(st.booleans()),
        constraint=constraint,
        accepts=accepts,
        scope=draw(st.sampled_from(("text", "gaps"))),
    )


def check_totals(case, ready):
    table = case.fills()
    total = math.fsum(table.values())
    everything = math.fsum(case.fills(constrained=False).values())
    assert_allclose(ready.log_evidence, math.log(everything), **EXACT)
    if case.constraint is not None:
        assert_allclose(ready.log_constraint, math.log(total / everything), rtol=1e-9, atol=1e-9)
        assert ready.log_constraint <= 0
    return table, total


@MANY
@given(case=cases())
def test_totals_samples_and_marginals_are_those_of_every_fill(case):
    if not case.fills():
        with pytest.raises(QueryError, match="impossible constraint|probability zero"):
            case.prepare()
        return
    ready = case.prepare()
    table, total = check_totals(case, ready)
    for fill in ready.sample(4, seed=1):
        key = tuple(tuple(ids_of(case.model, words)) for words in fill.gaps)
        assert key in table
        assert_allclose(fill.log_prob, math.log(table[key] / total), **EXACT)
        assert_allclose(ready.log_prob(*fill.gaps), fill.log_prob, **EXACT)
    for number, gap in enumerate(ready.marginals()):
        check_marginals(gap, number, table, total)


def check_marginals(gap, number, table, total):
    for n, probability in gap.lengths.items():
        of_length = {fill: p for fill, p in table.items() if len(fill[number]) == n}
        mass = math.fsum(of_length.values())
        assert_allclose(probability, mass / total, **EXACT)
        if mass == 0 or n == 0:
            continue
        for place in range(n):
            expected = np.zeros(len(gap.words[n][place].probabilities))
            for fill, p in of_length.items():
                expected[fill[number][place]] += p / mass
            assert_allclose(gap.words[n][place].probabilities, expected, **EXACT)


@MANY
@given(case=cases())
def test_best_is_the_best_path_or_the_most_probable_word(case):
    table = case.fills()
    assume(table and case.wishes["scope"] == "text")
    ready = case.prepare()
    best = ready.best()
    key = tuple(tuple(ids_of(case.model, words)) for words in best.fill.gaps)
    assert_allclose(best.fill.log_prob, math.log(table[key] / math.fsum(table.values())), **EXACT)
    if [item for item in case.items if isinstance(item, tuple)] == [(1, 1)]:
        assert best.criterion == "most probable word"
        assert_allclose(table[key], max(table.values()), **EXACT)
        return
    accepts = None
    if case.accepts is not None:
        accepts = (lambda ids: case.accepts(ids[:-1])) if case.added else case.accepts
    expected = oracle.best_joint(oracle_model(case.model), case.items, case.wishes["allow_eos"], accepts)
    assert best.criterion == "joint path"
    assert_allclose(best.path_log_prob + math.log(math.fsum(table.values())), math.log(expected), **EXACT)
    assert_allclose(oracle.path_maximum(oracle_model(case.model), best.fill.ids), expected, **EXACT)


EDGES = [
    "[MASK]",
    "[MASK] a",
    "a [MASK]",
    "[MASK:2] [MASK]",
    "[MASK:0-2]",
    "a [MASK:1-2] zzz [MASK] b",
    "a <eos> [MASK:1-2] b",
    "[MASK] <eos> [MASK]",
]


@pytest.mark.parametrize(("kind", "rule"), REAL)
def test_every_parameterization(kind, rule):
    model = real_model(kind, rule)
    number = REAL.index((kind, rule))
    for text in (EDGES[number % len(EDGES)], EDGES[(number + 3) % len(EDGES)]):
        case = Case(model, text, eos=number % 2 == 0, allow_eos=number % 3 == 0)
        table, total = check_totals(case, case.prepare())
        ready = case.prepare()
        for position, gap in enumerate(ready.marginals()):
            check_marginals(gap, position, table, total)


@pytest.mark.parametrize("text", EDGES)
@pytest.mark.parametrize(
    ("rule", "eos", "allow_eos"), [("reset", True, True), ("carry", False, True), ("reset", False, False)]
)
def test_edges(text, rule, eos, allow_eos):
    model = random_model(9, num_words=2, num_blocks=2, size=2, rule=rule)
    case = Case(model, text, eos, allow_eos)
    check_totals(case, case.prepare())


@pytest.mark.parametrize(
    ("text", "kind", "rule", "allow_eos"),
    [
        ("a [MASK:1-3] b", "partition", "reset", False),
        ("[MASK:0-2] b [MASK]", "uniform", "carry", True),
        ("[MASK:2] <eos> [MASK:0-1]", "dead", "reset", True),
        ("[MASK:1-2] [MASK:0-1]", "zeros", "reset", True),
    ],
)
def test_fills_are_drawn_with_their_probabilities(text, kind, rule, allow_eos):
    model = random_model(3, num_words=2, num_blocks=2, size=2, kind=kind, rule=rule)
    case = Case(model, text, allow_eos=allow_eos)
    table = case.fills()
    total = sum(table.values())
    drawn = Counter(
        tuple(tuple(ids_of(model, words)) for words in fill.gaps) for fill in case.prepare().sample(4000, seed=2)
    )
    statistic, degrees = oracle.chi_square(drawn, {fill: p / total for fill, p in table.items()})
    assert statistic < oracle.chi_square_limit(degrees)


def test_ten_thousand_constrained_texts_satisfy_the_constraint():
    model = random_model(7, num_words=4, num_blocks=3, size=2)
    a, b, c = ids_of(model, "a b c".split())
    constraint = must_contain("a b", "c") & must_not("c c") & length(3, 6)

    def accepts(ids):
        wanted = oracle.contains(ids, [a, b]) and oracle.contains(ids, [c]) and not oracle.contains(ids, [c, c])
        return wanted and 3 <= len(ids) <= 6

    drawn = sample(model, 10_000, "d", max_tokens=8, constraint=constraint, seed=4)
    satisfied = sum(accepts(ids_of(model, text.text.split())) for text in drawn)
    assert satisfied == 10_000
    assert len({text.text for text in drawn}) > 100


@pytest.mark.parametrize("rule", ["reset", "carry"])
def test_constrained_texts_are_drawn_with_their_probabilities(rule):
    model = random_model(8, num_words=2, num_blocks=2, size=2, rule=rule)
    (a,) = ids_of(model, ["a"])
    case = Case(
        model,
        "b [MASK:0-3]",
        constraint=must_contain("a a"),
        accepts=lambda ids: oracle.contains(ids, [a, a]),
    )
    table = case.fills()
    total = sum(table.values())
    ready = constrained(model, "b", must_contain("a a"), max_tokens=3)
    assert_allclose(ready.log_constraint, math.log(total / sum(case.fills(False).values())), **EXACT)
    drawn = ready.draw(4000, seed=9)
    counts = Counter((tuple(ids_of(model, text.words)),) for text in drawn)
    statistic, degrees = oracle.chi_square(counts, {fill: p / total for fill, p in table.items()})
    assert statistic < oracle.chi_square_limit(degrees)
    for text in drawn[:20]:
        assert_allclose(text.log_prob, math.log(table[(tuple(ids_of(model, text.words)),)] / total), **EXACT)


def test_float32_tables_answer_nearly_the_same():
    single = real_model("block-factored", "reset", dtype=torch.float32)
    double = DenseModel(single.distributions.double(), single.vocabulary, single.rule)
    text = "a [MASK:1-3] b [MASK] zzz"
    ours, theirs = prepare(single, text), prepare(double, text)
    assert_allclose(ours.log_evidence, theirs.log_evidence, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a b", "no gap"),
        ("a [MASK:5-2] b", "counts downwards"),
        ("a [MASK:] b", "malformed mask"),
        ("a [MASK:x] b", "malformed mask"),
        ("a [MASKED] b", "malformed mask"),
        ("a [MASK:0] b", "expected 1 to"),
        ("a [MASK:0-0] b", "expected 1 to"),
        ("a [MASK:1-99999] b", "expected 1 to"),
    ],
)
def test_malformed_gaps_are_refused(text, what):
    with pytest.raises(QueryError, match=what):
        prepare(random_model(0), text)


def test_memory_is_predicted_before_it_is_taken():
    model = random_model(0, num_blocks=3, size=3)
    wanted = must_contain("a b", "b a") & length(0, 40)
    with pytest.raises(QueryError, match=r"automaton of \d+ states over 9 model states would take"):
        prepare(model, "[MASK:0-40]", wanted, memory=1000)
    ready = prepare(model, "[MASK:0-40]", wanted)
    kept = sum(
        value.rows.values.numel() * 8 for gap in ready._lattice.gaps.values() for value in gap.remaining if value.rows
    )
    assert kept <= ready.template.num_bytes(9)


def test_impossible_wishes_are_refused():
    model = random_model(0, num_words=2)
    with pytest.raises(QueryError, match="impossible constraint"):
        prepare(model, "a [MASK] b", must_contain("a a a"))
    with pytest.raises(QueryError, match="impossible constraint"):
        prepare(model, "a [MASK] b", must_not("a"))
    with pytest.raises(QueryError, match="no word 'A' in the vocabulary of .* words; nearest: a"):
        prepare(model, "a [MASK] b", must_contain("A"))
    with pytest.raises(QueryError, match="unknown scope"):
        prepare(model, "a [MASK]", scope="all")
    with pytest.raises(QueryError, match="has 1 gaps"):
        prepare(model, "a [MASK]").log_prob("a", "b")
    with pytest.raises(QueryError, match="no temperature"):
        sample(model, constraint=must_contain("a"), temperature=0.5)
    model.distributions.emission[model.vocabulary.id_of["a"]] = 0
    with pytest.raises(QueryError, match="probability zero"):
        prepare(model, "a [MASK] b")
    with pytest.raises(QueryError, match="every text that satisfies it has probability zero"):
        prepare(model, "b [MASK] b", must_contain("a"))


def test_a_fill_outside_the_question_has_probability_zero():
    model = random_model(0, num_words=2)
    ready = prepare(model, "a [MASK:1-2] b", must_not("a a"))
    assert ready.log_prob("b b b") == -math.inf
    assert ready.log_prob("<eos>") == -math.inf
    assert ready.log_prob("a") == -math.inf
    assert ready.log_prob("b") > -math.inf

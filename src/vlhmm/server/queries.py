"""The library's exact queries as JSON. Input: a model and checked arguments. Output: what the routes answer."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import and_
from types import ModuleType
from typing import Any

import numpy as np

from vlhmm.constraints.automaton import Automaton
from vlhmm.constraints.constraint import Constraint, compile_constraint, length, must_contain, must_not, regex
from vlhmm.data.tokenizer import TokenVocabulary
from vlhmm.data.user_text import generator_of, known_word
from vlhmm.data.vocabulary import EOS
from vlhmm.lattice.template import Fixed, Gap, Item, parse_template
from vlhmm.queries.decode import decode, posteriors
from vlhmm.queries.infill import Fill, GapDistribution, Infilling, prepare, prepare_items
from vlhmm.queries.left_to_right import next_distribution
from vlhmm.queries.score import token_scores, total
from vlhmm.queries.word_posterior import word_posteriors
from vlhmm.server import requests as read
from vlhmm.server.errors import RequestError, about
from vlhmm.server.limits import Limits
from vlhmm.server.scoring import Token
from vlhmm.server.tokenizer import Tokenizer


def finite(value: float) -> float | None:
    """Return a number as JSON; null for minus infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def scored_text(text: str, tokens: Sequence[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a text with the log-probability of every token."""
    return {
        "text": text,
        "log_prob": finite(total(token.log_prob for token in tokens)),
        "num_tokens": len(tokens),
        "oov": tokenizer.num_oov(text),
        "tokens": [{"word": tokenizer.word(t.id), "id": t.id, "log_prob": finite(t.log_prob)} for t in tokens],
    }


def next_words(model: Any, tokenizer: Tokenizer, context: str, top_k: int) -> dict[str, Any]:
    """Return the most probable words after a context, and the entropy of the whole distribution."""
    with about("context"):
        found = next_distribution(model, tokenizer.sentence(context))
    return {
        "context": context,
        "eos": model.vocabulary.words[model.vocabulary.eos],
        "oov": tokenizer.num_oov(context),
        "entropy": found.entropy,
        "sum": float(found.probabilities.sum()),
        "words": [
            {"word": w.word, "probability": w.probability, "log_prob": finite(w.log_prob)} for w in found.top(top_k)
        ],
    }


def text_posteriors(
    model: Any, tokenizer: Tokenizer, written: str, eos: bool, top_k: int, num_states: int, memory: int
) -> dict[str, Any]:
    """Return surprisals, the words expected given both sides, state posteriors and the best path of a text."""
    text = tokenizer.sentence(written)
    with about("text"):
        known = posteriors(model, text, eos, memory)
    (path,) = decode(model, text, "viterbi", 1, eos, memory)
    scores = token_scores(model, text, eos)
    places = []
    expected = list(word_posteriors(model, text, eos, memory=memory))
    for t, word in enumerate(known.words):
        best = known.smoothed[t].topk(min(num_states, known.smoothed.shape[1]))
        states = [
            {"state": int(known.states[t, slot]), "smoothed": value, "filtered": float(known.filtered[t, slot])}
            for slot, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        places.append(
            {
                "word": word,
                "oov": scores[t].oov,
                "log_prob": finite(scores[t].log_prob),
                "block": path.blocks[t],
                "path_state": path.states[t],
                "path_posterior": path.posteriors[t],
                "states": states,
                "log_prob_given_rest": finite(expected[t].log_prob(word)),
                "expected": [{"word": w.word, "probability": w.probability} for w in expected[t].top(top_k)],
            }
        )
    return {
        "text": written,
        "log_prob": finite(total(score.log_prob for score in scores)),
        "eos_log_prob": finite(scores[-1].log_prob) if eos else None,
        "path_log_prob": path.log_prob,
        "places": places,
    }


def constraint_of(model: Any, body: read.Body, limits: Limits) -> Constraint | None:
    """Return the conjunction of the constraints in a request, or None."""
    parts: list[tuple[str, Constraint]] = []
    asked = [name for name in ("must_contain", "must_not", "regex", "length") if body.get(name) is not None]
    if asked and isinstance(model.vocabulary, TokenVocabulary):
        raise RequestError(
            f"{asked[0]} speaks of words, and the model's tokens are pieces of words; use structured_outputs of "
            "/v1/completions", asked[0],
        )  # fmt: skip
    contain, absent = read.strings(body, "must_contain", 16), read.strings(body, "must_not", 16)
    for name, phrases in (("must_contain", contain), ("must_not", absent)):
        if any(not phrase.split() for phrase in phrases):
            raise RequestError(f"{name} holds a phrase of blanks, expected words", name)
    if contain:
        parts.append(("must_contain", must_contain(*contain, in_order=read.boolean(body, "in_order", False))))
    if absent:
        parts.append(("must_not", must_not(*absent)))
    for pattern in read.strings(body, "regex", 8):
        check_pattern(pattern, limits, "regex")
        with about("regex"):
            parts.append(("regex", regex(pattern)))
    if body.get("length") is not None:
        parts.append(("length", length(*read.word_range(body, "length", limits.gap_words * 16))))
    for name, part in parts:
        with about(name):
            for word in sorted(part.words()):
                known_word(model.vocabulary, word)
    return reduce(and_, (part for _, part in parts)) if parts else None


def check_pattern(pattern: str, limits: Limits, param: str) -> None:
    """Raise a RequestError if a regular expression is too long."""
    if len(pattern) > limits.regex_chars:
        raise RequestError(f"regex has {len(pattern):,} characters, expected at most {limits.regex_chars:,}", param)


def check_template(model: Any, template: str, limits: Limits) -> None:
    """Raise a RequestError if the gaps of a template are too long, before anything is computed."""
    with about("template"):
        items, _ = parse_template(model.vocabulary, template)
    words = sum(item.high for item in items if isinstance(item, Gap))
    if words > limits.gap_words:
        raise RequestError(
            f"the gaps hold up to {words:,} words, expected at most {limits.gap_words}; shorten them", "template"
        )


def infill_parts(
    model: Any,
    tokenizer: Tokenizer,
    template: str,
    constraint: Constraint | None,
    scope: str,
    eos: bool,
    allow_eos: bool,
    mode: str,
    n: int,
    seed: int,
    top_k: int,
    limits: Limits,
    at_once: int,
) -> Iterator[dict[str, Any]]:
    """Yield the answer about a template's gaps: the probability of the constraint, then fills, `at_once` at a time.

    The best fill and the marginals come in one part.
    """
    if constraint is not None:
        compile_constraint(constraint, model.vocabulary, limits.automaton_states)
    with about("template"):
        ready = prepare(model, tokenizer.sentence(template), constraint, scope, eos, allow_eos, limits.memory)  # type: ignore[arg-type]
    answer: dict[str, Any] = {
        "template": template,
        "mode": mode,
        "log_evidence": finite(ready.log_evidence),
        "constraint_log_prob": None if ready.log_constraint is None else finite(ready.log_constraint),
        "constraint_probability": None if ready.log_constraint is None else math.exp(ready.log_constraint),
    }
    if mode == "sample":
        yield answer | {"fills": []}
        generator = generator_of(seed)
        for first in range(0, n, at_once):
            drawn = ready.sample(min(at_once, n - first), generator)
            yield {"fills": [fill_json(model, fill) for fill in drawn]}
    elif mode == "best":
        best = ready.best()
        yield answer | {"fills": [fill_json(model, best.fill)], "criterion": best.criterion}
    else:
        yield answer | {"gaps": [gap_json(gap, top_k) for gap in ready.marginals()]}


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the parts of an answer; lists of fills are concatenated."""
    whole: dict[str, Any] = {}
    for part in parts:
        fills = whole.get("fills", []) + part.get("fills", [])
        whole |= part
        if "fills" in whole:
            whole["fills"] = fills
    return whole


def gap_json(gap: GapDistribution, top_k: int) -> dict[str, Any]:
    """Return the lengths of a gap and, for each, the words of each position."""
    lengths = []
    for words, probability in gap.lengths.items():
        if probability > 0:
            places = [
                [{"word": w.word, "probability": w.probability} for w in place.top(top_k)]
                for place in gap.words.get(words, [])
            ]
            lengths.append({"length": words, "probability": probability, "places": places})
    return {"lengths": lengths}


def fill_json(model: Any, fill: Fill) -> dict[str, Any]:
    """Return a fill with its exact probability."""
    return {
        "text": fill.text,
        "gaps": [model.vocabulary.join(words) for words in fill.gaps],
        "log_prob": finite(fill.log_prob),
        "probability": math.exp(fill.log_prob),
    }


def between(
    model: Any,
    prompt: Sequence[int],
    suffix: Sequence[int] | None,
    low: int,
    high: int,
    constraint: Constraint | Automaton | None,
    limits: Limits,
) -> Infilling:
    """Prepare one gap of `low` to `high` words after a prompt: before `suffix`, or, without one, before the <eos>.

    A constraint applies to the words of the gap only. After a suffix the text may continue.
    """
    if isinstance(constraint, Constraint):
        with about("structured_outputs"):
            constraint = compile_constraint(constraint, model.vocabulary, limits.automaton_states)
    names = model.vocabulary.words
    end = [Fixed(model.vocabulary.eos, read=False)] if suffix is None else [Fixed(token) for token in suffix]
    items: list[Item] = [*(Fixed(token) for token in prompt), Gap(low, high), *end]
    words = [*(names[token] for token in prompt), f"[MASK:{low}-{high}]"]
    words += [EOS] if suffix is None else [names[token] for token in suffix]
    return prepare_items(model, items, words, constraint, "gaps", False, limits.memory)


def structured(model: Any, wish: object, limits: Limits) -> Constraint | Automaton:
    """Return the constraint of `structured_outputs`: one of regex, choice and json.

    For a model over words, patterns are over words. For a model over subwords, they are over the characters of the text.
    """
    name = "structured_outputs"
    if not isinstance(wish, dict) or len(wish) != 1 or next(iter(wish)) not in ("regex", "choice", "json"):
        raise RequestError(f"{name} takes an object with one of regex, choice and json", name)
    kind = next(iter(wish))
    subwords = isinstance(model.vocabulary, TokenVocabulary)
    if kind == "json":
        if not subwords:
            raise RequestError(
                "the model's tokens are whole words, which do not spell JSON; give a regex or a choice", name
            )
        if len(json.dumps(wish["json"])) > limits.regex_chars * 4:
            raise RequestError(f"json has more than {limits.regex_chars * 4:,} characters; shorten it", name)
        return over_characters(model, lambda texts: texts.json_schema(wish["json"], limits.automaton_states))
    if kind == "regex":
        pattern = read.text(wish, "regex")
        check_pattern(pattern, limits, name)
        if subwords:
            return over_characters(model, lambda texts: texts.regex(pattern, limits.automaton_states))
        return regex(pattern)
    found = read.strings(wish, "choice", 256)
    if not found or any(not text.split() for text in found):
        raise RequestError("choice takes a list of texts of at least one word each", name)
    if sum(map(len, found)) > limits.regex_chars * 4:
        raise RequestError(f"choice has more than {limits.regex_chars * 4:,} characters; shorten it", name)
    if subwords:
        return over_characters(model, lambda texts: texts.choice(*found))
    return regex("|".join(" ".join(escaped(word) for word in text.split()) for text in found))


def over_characters(model: Any, make: Callable[[ModuleType], Any]) -> Automaton:
    """Compile a constraint on the characters of the text to an automaton over the tokens of a subword model."""
    try:
        from vlhmm.steering import text_constraint
        from vlhmm.steering.token_automaton import token_automaton

        made = make(text_constraint)
    except ImportError:
        raise RequestError(
            "constraints on the text of a subword model need pip install 'vlhmm[llm]'", "structured_outputs"
        ) from None
    vocabulary = model.vocabulary
    pieces = [spelled or None for spelled in vocabulary.token_bytes]
    found = token_automaton(made.automaton, pieces, [vocabulary.eos])
    dead = found.num_states
    eos_class = int(found.class_of_token[vocabulary.eos])
    delta = np.where(found.delta < 0, dead, found.delta).astype(np.int64)
    delta = np.vstack([delta, np.full((1, delta.shape[1]), dead)])
    accept = delta[:, eos_class] == found.final
    delta[:, eos_class] = dead  # the text of the gap ends before it
    return Automaton(delta, accept, found.class_of_token.astype(np.int64), eos_class)


def escaped(word: str) -> str:
    """Return a pattern that matches one word literally."""
    return "".join("\\" + character for character in word)

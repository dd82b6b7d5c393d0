"""Constraints on the text that a language model generates, combined by &, | and ~.

Input:  words, regular expressions, JSON schemas.
Output: `TextConstraint`, which compiles to a minimal `ByteAutomaton` of the whole generated text (without the prompt).

A word character is an ASCII letter, digit or underscore, or any character of U+00C0-U+1FFF and U+3040-U+D7FF. These
ranges contain the letters of nearly every script; punctuation, symbols and emoji are elsewhere. Unicode's own property
would make every automaton twenty times larger.
"""

import json
from collections.abc import Sequence
from functools import reduce
from operator import and_

from vlhmm.errors import ConfigError, QueryError
from vlhmm.steering import byte_automaton
from vlhmm.steering.byte_automaton import MAX_STATES, ByteAutomaton

_WORD = "0-9A-Za-z_\u00c0-\u1fff\u3040-\ud7ff"
_SPACE = r" \t\n\r\f\v"
_SPECIAL = set(r"\.+*?()|[]{}^$#&-~/")


class TextConstraint:
    """A regular set of texts. `a & b` is the intersection, `a | b` the union, `~a` the complement.

    Example:
        >>> constraint = must_include("park", ["dog", "dogs"]) & words(5, 12)
        >>> constraint.accepts("two dogs ran to the park")
        True
    """

    def __init__(self, description: str, automaton: ByteAutomaton, max_states: int = MAX_STATES) -> None:
        byte_automaton.check_size(automaton.num_states, max_states)
        self.description, self.automaton, self.max_states = description, automaton, max_states

    def __and__(self, other: "TextConstraint") -> "TextConstraint":
        limit = max(self.max_states, other.max_states)
        automaton = byte_automaton.intersection(self.automaton, other.automaton, limit)
        return TextConstraint(f"({self.description} & {other.description})", automaton, limit)

    def __or__(self, other: "TextConstraint") -> "TextConstraint":
        limit = max(self.max_states, other.max_states)
        automaton = byte_automaton.union(self.automaton, other.automaton, limit)
        return TextConstraint(f"({self.description} | {other.description})", automaton, limit)

    def __invert__(self) -> "TextConstraint":
        automaton = byte_automaton.complement(self.automaton, self.max_states)
        return TextConstraint(f"~{self.description}", automaton, self.max_states)

    def __repr__(self) -> str:
        return f"TextConstraint({self.description}, {self.automaton.num_states} states)"

    def accepts(self, text: str | bytes) -> bool:
        """Return whether the whole text satisfies the constraint."""
        return self.automaton.accepts(text)


def anything() -> TextConstraint:
    """Accept every valid text. Only an end within the token budget is required."""
    return TextConstraint("anything()", byte_automaton.any_text())


def regex(pattern: str, max_states: int = MAX_STATES) -> TextConstraint:
    """Accept texts that match the pattern as a whole (Rust syntax; `.` does not match a newline unless (?s) is set)."""
    return TextConstraint(f"regex({pattern!r})", byte_automaton.from_regex(pattern, ours=False), max_states)


def choice(*options: str) -> TextConstraint:
    """Accept the given texts only."""
    _check_texts("choice", options)
    return TextConstraint(f"choice{options!r}", byte_automaton.from_regex(_alternatives(options)))


def json_schema(schema: str | dict[str, object], max_states: int = MAX_STATES) -> TextConstraint:
    """Accept JSON values of the schema, as `outlines-core` converts it to a regular expression."""
    try:
        from outlines_core.json_schema import build_regex_from_schema
    except ImportError:
        raise ConfigError("constraints on text need outlines-core: pip install 'vlhmm[llm]'") from None
    source = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        pattern = build_regex_from_schema(source)
    except (ValueError, TypeError) as error:
        raise QueryError(f"cannot use the JSON schema: {' '.join(str(error).split())[:160]}") from None
    return TextConstraint("json_schema(...)", byte_automaton.from_regex(pattern, ours=False), max_states)


def must_include(*items: str | Sequence[str], any_case: bool = False, max_states: int = MAX_STATES) -> TextConstraint:
    """Accept texts that contain every item at word boundaries. An item that is a list stands for any one of its members.

    The minimal automaton has about 2^items * letters states.
    """
    if not items:
        raise QueryError("must_include needs at least one word")
    parts = []
    for item in items:
        alternatives = [item] if isinstance(item, str) else list(item)
        parts.append(TextConstraint(f"must_include({item!r})", _including(alternatives, any_case), max_states))
    whole = reduce(and_, parts)
    whole.description = f"must_include{items!r}"
    return whole


def must_not(*items: str, any_case: bool = False, max_states: int = MAX_STATES) -> TextConstraint:
    """Accept texts that contain none of the words or phrases at word boundaries."""
    if not items:
        raise QueryError("must_not needs at least one word")
    refused = byte_automaton.complement(_including(items, any_case), max_states)
    return TextConstraint(f"must_not{items!r}", refused, max_states)


def words(low: int, high: int | None = None) -> TextConstraint:
    """Accept texts of `low` to `high` words (runs of characters between white space). None means no upper limit."""
    if low < 0 or (high is not None and high < low):
        raise QueryError(f"words({low}, {high}): expected 0 <= low <= high")
    byte_automaton.check_size(8 * max(low, high or 0), MAX_STATES)  # states inside multi-byte characters included
    space, other = f"[{_SPACE}]", f"[^{_SPACE}]"
    more = "" if high is None else str(high - 1)
    if high == 0:
        pattern = f"{space}*"
    else:
        some = f"{space}*{other}+({space}+{other}+){{{max(low - 1, 0)},{more}}}{space}*"
        pattern = f"({some})|{space}*" if low == 0 else some
    return TextConstraint(f"words({low}, {high})", byte_automaton.from_regex(pattern))


def prefix(text: str) -> TextConstraint:
    """Accept texts that begin with `text`."""
    return TextConstraint(f"prefix({text!r})", byte_automaton.from_regex(f"(?s){escape(text)}.*"))


def suffix(text: str) -> TextConstraint:
    """Accept texts that end with `text`."""
    return TextConstraint(f"suffix({text!r})", byte_automaton.from_regex(f"(?s).*{escape(text)}"))


def sentence_end() -> TextConstraint:
    """Accept texts that end with . ! or ?, possibly followed by closing quotes or brackets."""
    return TextConstraint("sentence_end()", byte_automaton.from_regex("(?s).*[.!?][\"')\u201d\u2019]*"))


_regex, _choice, _json_schema, _must_include, _must_not = regex, choice, json_schema, must_include, must_not
_words, _prefix, _suffix, _sentence_end = words, prefix, suffix, sentence_end


def constraint(
    *,
    regex: str | None = None,
    choice: Sequence[str] = (),
    json_schema: str | dict[str, object] | None = None,
    must_include: Sequence[str | Sequence[str]] = (),
    must_not: Sequence[str] = (),
    words: tuple[int, int | None] | None = None,
    prefix: str = "",
    suffix: str = "",
    sentence_end: bool = False,
    any_case: bool = False,
    max_states: int = MAX_STATES,
) -> TextConstraint:
    """Combine the named constraints; all of them must hold. Without any, every text is accepted.

    Args:
        regex: A pattern that the whole text matches.
        choice: The text is one of these.
        json_schema: The text is a JSON value of this schema.
        must_include: Words or phrases that the text contains, each at word boundaries. A list means any one of its members.
        must_not: Words or phrases that the text does not contain.
        words: The least and the greatest number of words; None for no upper limit.
        prefix: The beginning of the text.
        suffix: The end of the text.
        sentence_end: Whether the text ends with . ! or ?
        any_case: Whether must_include and must_not ignore case.
        max_states: Automata with more states are refused.

    Returns:
        The combined constraint.

    Example:
        >>> constraint(must_include=["park", ["dog", "dogs"]], words=(5, 12)).accepts("two dogs ran to the park")
        True
    """
    parts = []
    if regex is not None:
        parts.append(_regex(regex, max_states))
    if choice:
        parts.append(_choice(*choice))
    if json_schema is not None:
        parts.append(_json_schema(json_schema, max_states))
    if must_include:
        parts.append(_must_include(*must_include, any_case=any_case, max_states=max_states))
    if must_not:
        parts.append(_must_not(*must_not, any_case=any_case, max_states=max_states))
    if words is not None:
        parts.append(_words(*words))
    if prefix:
        parts.append(_prefix(prefix))
    if suffix:
        parts.append(_suffix(suffix))
    if sentence_end:
        parts.append(_sentence_end())
    return reduce(and_, parts) if parts else anything()


def escape(text: str) -> str:
    """Return a regular expression that matches this text and nothing else."""
    return "".join("\\" + letter if letter in _SPECIAL else letter for letter in text)


def _check_texts(name: str, texts: Sequence[str]) -> None:
    if not texts or not all(texts):
        raise QueryError(f"{name}: a text is empty, expected words or phrases")
    byte_automaton.check_size(max(len(text.encode()) for text in texts), MAX_STATES)  # one state per byte


def _alternatives(texts: Sequence[str]) -> str:
    return "(" + "|".join(escape(text) for text in texts) + ")"


def _any_case(text: str) -> str:
    forms = ({letter, letter.lower(), letter.upper()} for letter in text)
    return "".join("(" + "|".join(escape(form) for form in sorted(choices)) + ")" for choices in forms)


def _including(texts: Sequence[str], any_case: bool) -> ByteAutomaton:
    """Compile (.*[^word])? text ([^word].*)?; a side whose outer character is not a word character needs no boundary."""
    _check_texts("must_include or must_not", texts)
    parts = []
    for text in texts:
        before = f"(.*[^{_WORD}])?" if _is_word(text[0]) else ".*"
        after = f"([^{_WORD}].*)?" if _is_word(text[-1]) else ".*"
        parts.append(before + (_any_case(text) if any_case else escape(text)) + after)
    return byte_automaton.from_regex("(?s)" + "|".join(f"({part})" for part in parts))


def _is_word(letter: str) -> bool:
    return letter == "_" or (letter.isascii() and letter.isalnum()) or (
        "\u00c0" <= letter <= "\u1fff" or "\u3040" <= letter <= "\ud7ff"
    )

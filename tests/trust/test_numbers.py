"""Every number a user gives has a range, checked before any work; what would take hours or more than memory is refused."""

import itertools
import time

import numpy as np
import pytest

from toy import toy_lines
from vlhmm.cli.main import build_parser, main
from vlhmm.constraints import dfa
from vlhmm.constraints.constraint import Contains, compile_constraint, length, must_contain, must_not, regex
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import ConfigError, QueryError
from vlhmm.limits import check_range, digits, time_of, whole_number

HUGE = ("9" * 5000, "1" + "0" * 30, "-1", "nan", "1e400", "", "\u0663", "0x10")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    for name, count, seed in (("train", 200, 1), ("valid", 40, 2)):
        (folder / f"{name}.txt").write_text("\n".join(map(" ".join, toy_lines(count, seed))) + "\n")
    code = main(
        ["train", str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--preset", "tiny", "--states", "32",
         "--blocks", "4", "--epochs", "1", "--out", str(folder / "run"), "--quiet"]
    )  # fmt: skip
    assert code == 0
    return folder / "run"


def ask(*arguments: str) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as ended:  # argparse
        return int(ended.code or 0)


def refused(capsys, *arguments) -> str:
    """The one line with which a command is refused, quickly."""
    began = time.monotonic()
    assert ask(*arguments) == 2, arguments
    assert time.monotonic() - began < 20
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.count("\n") == 1 and len(error) < 1500, error
    return error


@pytest.mark.parametrize("value", HUGE, ids=lambda value: value[:6])
@pytest.mark.parametrize(
    "option",
    ["infill -n", "infill --threads", "infill --seed", "infill --memory", "infill --top-k", "infill --length", "sample -n",
     "sample --max-tokens", "sample --top-k", "decode -k", "information --words", "information --streams",
     "verify --texts", "evaluate --streams", "surprisal --worst", "train --states", "train --time-limit",
     "train --max-vocab", "cluster --blocks", "cluster --seed", "inspect --top", "serve --max-prompt-tokens",
     "serve --max-seconds", "steer -n", "steer --max-new-tokens", "steer --temperature", "steer --weight", "steer --particles",
     "steer --beams", "steer --batch", "distill --tokens", "distill --max-new-tokens", "distill --batch"],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(run, capsys, option, value):
    verb, name = option.split()
    rest = {
        "infill": [run, "a [MASK]"], "sample": [run], "decode": [run], "information": [run, "entropy"], "verify": [run],
        "evaluate": [run, "x.txt"], "surprisal": [run], "inspect": [run], "cluster": ["x.txt"],
        "train": ["x.txt", "--valid", "x.txt", "--out", "x"], "serve": [run], "steer": [run, "--llm", "x", "--prompt", "x"],
        "distill": ["x", "--prompts", "x.txt", "--out", "x"],
    }[verb]  # fmt: skip
    if name == "--memory" and value == "1e400":
        value = "9" * 400
    assert name in refused(capsys, verb, *rest, f"{name}={value}") or name in ("--states",)


def test_every_number_on_a_command_line_has_a_range():
    verbs = next(action.choices for action in build_parser(everything=True)._actions if action.dest == "verb")
    bare = [(verb, action.dest) for verb, parser in verbs.items() for action in parser._actions if action.type in (int, float)]
    assert bare == []


@pytest.mark.parametrize("words", ["9" * 5000, "1-" + "9" * 5000, "\u0663", "9-1", "-", "1-2-3", "1000000000-"])
def test_numbers_of_words_out_of_range_are_refused(run, capsys, words):
    pytest.importorskip("outlines_core")
    refused(capsys, "steer", run, "--llm", "x", "--prompt", "x", f"--length={words}")


@pytest.mark.parametrize("value", ["1e-400", "nan", "inf", "-1", "x", "0"])
@pytest.mark.parametrize("name", ["--temperature", "--top-p"])
def test_real_numbers_out_of_range_are_refused(run, capsys, name, value):
    assert name[2:].replace("-", "_") in refused(capsys, "sample", run, f"{name}={value}").replace("-", "_")


def test_a_hundred_thousand_threads_are_refused(run, capsys):
    assert "1,024" in refused(capsys, "score", run, "--threads", "100000")


@pytest.mark.parametrize("setting", ["model.num_states", "model.hidden_size", "training.seed", "training.epochs", "min_count"])
@pytest.mark.parametrize("value", ["9" * 5000, "2^1000000000", "1" + "0" * 30, "2^100", "-1"], ids=lambda value: value[:6])
def test_settings_out_of_range_are_refused(run, capsys, setting, value):
    texts = run.parent
    error = refused(
        capsys, "train", texts / "train.txt", "--valid", texts / "valid.txt", "--out", texts / "x", "--set", f"{setting}={value}"
    )  # fmt: skip
    assert setting.rpartition(".")[2] in error


@pytest.mark.parametrize(
    "text", [f"[MASK:{'9' * 5000}]", f"[MASK:1-{'9' * 5000}]", "[MASK:10001]", "[MASK:0]", "[MASK:3-2]", "[MASK:x]"]
)
def test_masks_out_of_range_are_refused(run, capsys, text):
    refused(capsys, "infill", run, text)


@pytest.mark.parametrize(
    "pattern",
    ["a{" + "9" * 5000 + "}", "a{1," + "9" * 5000 + "}", "(){1000000000}", "((){100000}){100000}", "a{100000}", "(. | a b c){9999}",
     "(.* a){400} .{400}"],
    ids=lambda pattern: pattern[:12],
)  # fmt: skip
def test_regular_expressions_beyond_their_limits_are_refused(run, capsys, pattern):
    refused(capsys, "infill", run, "the [MASK] .", "--regex", pattern)


def test_a_phrase_of_very_many_words_is_refused_or_answered(run, capsys):
    refused(capsys, "infill", run, "the [MASK] .", "--must-contain", " ".join(["the"] * 5000))
    assert "impossible" in refused(capsys, "infill", run, "the [MASK] .", "--must-contain", " ".join(["the"] * 4000))
    assert "impossible" in refused(capsys, "infill", run, "the [MASK] .", "--must-contain", " ".join(["the", "dog"] * 1500))


def test_more_samples_than_memory_holds_are_refused_with_an_estimate(run, capsys):
    for question in (["infill", run, "the [MASK:1-3] ."], ["sample", run], ["sample", run, "--must-contain", "the"]):
        error = refused(capsys, *question, "-n", "1000000000", "--quiet")
        assert "GiB" in error and "1,000,000,000" in error
    assert "GiB" in refused(capsys, "information", run, "entropy", "--streams", "1000000", "--tokens", "1000000")


def test_what_takes_hours_is_refused_with_an_estimate(run, capsys, monkeypatch):
    error = refused(capsys, "information", run, "phrase", "the", "--max-tokens", "1000000000")
    assert "hours" in error or "days" in error
    assert ask("information", run, "phrase", "the", "--max-tokens", "50") == 0


def test_what_takes_minutes_shows_its_progress_and_can_be_interrupted(run, capsys, monkeypatch):
    """100,000 words take less than an hour: the question is answered, with a bar on a terminal, and Ctrl-C ends it."""
    import contextlib

    from vlhmm.cli import information

    seen: list[tuple[int, int]] = []

    def look(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(information, "token_progress", lambda *_: contextlib.nullcontext(look))
    assert ask("information", run, "phrase", "the dog", "--max-tokens", "100000") == 130
    assert [total for _, total in seen] == [100_000] * 30 and [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a\0b", "a\udcffb"])
@pytest.mark.parametrize("question", [["evaluate", "{}", "x"], ["evaluate", "RUN", "{}"], ["infill", "RUN", "{} [MASK]"], ["{}"]])
def test_arguments_that_are_no_text_are_refused(run, capsys, question, text):
    refused(capsys, *(part.replace("{}", text).replace("RUN", str(run)) for part in question))


# ---- the helpers


def test_digits():
    assert digits("0012") == 12 and digits("9" * 15) == 10**15 - 1 and digits("0" * 5000 + "7") == 7
    assert all(digits(text) is None for text in ("", "-1", "1.0", "9" * 16, "\u0663", "1_000", " 1"))


def test_whole_numbers_and_ranges():
    assert whole_number("-3", "x", -5, 5) == -3 and whole_number("1_000", "x") == 1000
    for text in ("-6", "6", "five", "9" * 5000):
        with pytest.raises(ConfigError, match="x .*: expected a whole number from -5 to 5"):
            whole_number(text, "x", -5, 5)
    check_range("x", None, 0, 1)
    with pytest.raises(ConfigError, match="x=nan is out of range"):
        check_range("x", float("nan"), 0, 1)
    assert [time_of(s) for s in (40, 700, 18_000, 1e6)] == ["40 s", "12 min", "5.0 hours", "12 days"]


# ---- the automata that phrases make, against their definition

WORDS = ("a", "b", "c", "<eos>", "<unk>")


def holds(text, phrases) -> bool:
    """Whether the phrases stand in the text one after the other, each as early as it can."""
    place = 0
    for phrase in phrases:
        ends = [i + len(phrase) for i in range(place, len(text) - len(phrase) + 1) if text[i : i + len(phrase)] == phrase]
        if not ends:
            return False
        place = min(ends)
    return True


@pytest.mark.parametrize(
    "phrases", [("a",), ("a a b",), ("a b a b",), ("a b a", "a b"), ("b", "b", "a a"), ("a a a", "a a"), ("a b a a b",)]
)
def test_phrases_in_order_accept_what_holds_them(phrases):
    parts = tuple(tuple(phrase.split()) for phrase in phrases)
    symbols = {"a": 0, "b": 1}
    found = Contains(parts).dfa(symbols, 3, 100)
    assert dfa.minimal(found).num_states == found.num_states
    for size in range(8):
        for text in itertools.product("abc", repeat=size):
            assert found.accepts([{"a": 0, "b": 1, "c": 2}[word] for word in text]) == holds(text, parts), text


def plain_minimal_size(automaton: dfa.DFA) -> int:
    """How many classes of states there are that some sequence of symbols tells apart, by pairs."""
    count = automaton.num_states
    apart = automaton.accept[:, None] != automaton.accept[None]
    for _ in range(count):
        apart = apart | apart[automaton.delta[:, None, :], automaton.delta[None, :, :]].any(axis=2)
    reached, todo = {0}, [0]
    while todo:
        for following in set(automaton.delta[todo.pop()].tolist()) - reached:
            reached.add(following)
            todo.append(following)
    kept = sorted(reached)
    return len({tuple(apart[state, kept].tolist()) for state in kept})


def test_minimal_automata_are_minimal_and_accept_the_same():
    rng = np.random.default_rng(0)
    for _ in range(60):
        states, symbols = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        whole = dfa.DFA(rng.integers(states, size=(states, symbols)), rng.random(states) < 0.4)
        small = dfa.minimal(whole)
        assert small.num_states == plain_minimal_size(whole)
        for size in range(5):
            for text in itertools.product(range(symbols), repeat=size):
                assert whole.accepts(text) == small.accepts(text)


def test_equal_hashes_do_not_merge_states(monkeypatch):
    """The hash is only a quick way to the answer: with one that tells nothing apart the answer is the same."""

    class Constant:
        def integers(self, *_, size, **__):
            return np.zeros(size, dtype=np.int64)

    vocabulary = Vocabulary(WORDS)
    constraints = [regex("a .* b c?"), must_contain("a b", "b a") & must_not("c"), length(2, 5)]
    sizes = [compile_constraint(constraint, vocabulary).num_states for constraint in constraints]
    monkeypatch.setattr(np.random, "default_rng", lambda *_: Constant())
    assert [compile_constraint(constraint, vocabulary).num_states for constraint in constraints] == sizes


def test_lengths_of_thousands_of_words_compile_in_seconds():
    began = time.monotonic()
    assert compile_constraint(length(10, 3000), Vocabulary(WORDS)).num_states == 3002
    with pytest.raises(QueryError, match="limit"):
        compile_constraint(length(10, 10**9), Vocabulary(WORDS))
    assert time.monotonic() - began < 20

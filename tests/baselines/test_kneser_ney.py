"""Kneser-Ney against a slow version written from the formulas, KenLM's numbers, and the ARPA format."""

import gzip
import itertools
import json
import math
import os
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import check_language_model, next_word_distribution
from vlhmm import load_any
from vlhmm.baselines import load_baseline
from vlhmm.baselines.kneser_ney import FALLBACK_DISCOUNTS, KneserNey, estimate, save
from vlhmm.cli.main import main
from vlhmm.data.text import Text, encode, learn
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import CheckpointError, ConfigError, DataError, QueryError
from vlhmm.evaluation.perplexity import evaluate

# The oracle: it imports nothing, and counts by dictionary.


class SlowKneserNey:
    """p(w | context) from the definition; sentences are lists of words, without <eos>."""

    def __init__(self, sentences, vocabulary, order):
        self.vocabulary, self.order = vocabulary, order
        padded = [["<s>", *words, "<eos>"] for words in sentences]
        raw = [Counter(tuple(s[i : i + n]) for s in padded for i in range(len(s) - n + 1)) for n in range(1, order + 1)]
        left = Counter(ngram[1:] for longer in raw[1:] for ngram in longer)
        self.adjusted = [
            {g: c if n == order or g[0] == "<s>" else left[g] for g, c in counts.items() if g != ("<s>",)}
            for n, counts in enumerate(raw, start=1)
        ]
        self.discount = [self.discounts(table.values()) for table in self.adjusted]

    @staticmethod
    def discounts(counts):
        n = Counter(counts)
        if not (n[1] and n[2] and n[3]):
            return {1: 0.5, 2: 1.0, 3: 1.5}
        y = n[1] / (n[1] + 2 * n[2])
        found = {j: j - (j + 1) * y * n[j + 1] / n[j] for j in (1, 2, 3)}
        return found if all(0 < found[j] <= j for j in found) else {1: 0.5, 2: 1.0, 3: 1.5}

    def prob(self, word, context):
        """The recursion of the textbook; `context` a tuple of order-1 words at most."""
        n = len(context) + 1
        table, discount = self.adjusted[n - 1], self.discount[n - 1]
        lower = self.prob(word, context[1:]) if context else 1 / len(self.vocabulary)
        after = {g[-1]: a for g, a in table.items() if g[:-1] == context}
        total = sum(after.values())
        if not total:
            return lower
        own = after.get(word, 0)
        gamma = sum(discount[min(a, 3)] for a in after.values()) / total
        return (own - (discount[min(own, 3)] if own else 0)) / total + gamma * lower


def make(sentences, order, extra=()):
    """(our model, its vocabulary, the oracle)."""
    words = sorted({w for s in sentences for w in s} | set(extra) | {"<eos>", "<unk>"})
    vocabulary = Vocabulary(tuple(words))
    text = encode(sentences, vocabulary)
    return estimate(text, vocabulary, order), vocabulary, SlowKneserNey(sentences, words, order)


def zipf_sentences(seed, num_lines, num_words=30):
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, num_words + 1)
    return [[f"w{i}" for i in rng.choice(num_words, rng.integers(0, 9), p=p / p.sum())] for _ in range(num_lines)]


sentences = st.lists(st.lists(st.sampled_from("ab") | st.sampled_from("abcd"), max_size=6), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(sentences, st.integers(1, 4))
def test_every_context_of_a_tiny_text_agrees_with_the_definition(lines, order):
    model, vocabulary, slow = make(lines, order, extra=["never"])
    contexts = {()}
    for line in lines:
        padded = ["<s>"] * (order - 1) + line
        contexts |= {tuple(padded[i : i + order - 1]) for i in range(len(line) + 1)}
    for context in contexts:
        ids = [vocabulary.id_of[w] for w in context if w != "<s>"]
        # The definition knows one <s>; a context of several is that of one.
        first = max((i for i, w in enumerate(context) if w == "<s>"), default=0)
        known = context[first:] if context else ("<s>",)[: order - 1]
        expected = [slow.prob(w, known) for w in vocabulary.words]
        got = next_word_distribution(model, ids)
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=0)
        assert abs(got.sum() - 1) < 1e-12


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_discounts_of_a_larger_text_agree_with_the_definition(order):
    model, vocabulary, slow = make(zipf_sentences(0, 200, 400), order)
    assert any(d != FALLBACK_DISCOUNTS for d in model.discounts)  # or the test says nothing of them
    for got, expected in zip(model.discounts, slow.discount, strict=True):
        assert got == pytest.approx((expected[1], expected[2], expected[3]), rel=1e-14)
    rng = np.random.default_rng(1)
    for _ in range(10):  # most of these contexts occur only in part
        ids = rng.integers(0, len(vocabulary), order - 1)
        ids = ids[ids != vocabulary.eos]
        context = ("<s>",) * (len(ids) < order - 1) + tuple(vocabulary.decode(ids))
        expected = [slow.prob(w, context) for w in vocabulary.words]
        np.testing.assert_allclose(next_word_distribution(model, ids), expected, rtol=1e-11, atol=0)


def test_one_sentence_of_one_word_by_hand():
    """Bigrams `<s> a` and `a <eos>`, once each: no n_2, hence D(1) = 1/2. V = 3.

    p(a) = (1 - 1/2) / 2 + (1/2 + 1/2) / 2 * 1/3 = 5/12, and p(<unk>) = 1/2 * 1/3.
    p(a | <s>) = (1 - 1/2) / 1 + 1/2 * p(a) = 17/24.
    """
    model, vocabulary, _ = make([["a"]], order=2)
    at_start = next_word_distribution(model, [])
    assert at_start[vocabulary.id_of["a"]] == pytest.approx(17 / 24, rel=1e-15)
    assert at_start[vocabulary.unk] == pytest.approx(1 / 2 * 1 / 6, rel=1e-15)
    after_unk = next_word_distribution(model, [vocabulary.unk])  # never seen: the unigrams
    assert after_unk[vocabulary.id_of["a"]] == pytest.approx(5 / 12, rel=1e-15)
    assert model.num_ngrams == 3 + 2 and model.num_parameters == 5 + 4


def test_sentence_starts_keep_their_plain_counts():
    """Trigrams of `a` (5 times) and `b a`: at the start a is counted 5 times, not by what precedes it."""
    model, vocabulary, slow = make([["a"]] * 5 + [["b", "a"]], order=3)
    assert slow.adjusted[1][("<s>", "a")] == 5 and slow.adjusted[1][("a", "<eos>")] == 2
    expected = slow.prob("a", ("<s>",))
    assert next_word_distribution(model, [])[vocabulary.id_of["a"]] == pytest.approx(expected, rel=1e-14)
    assert expected > 0.7


def test_language_model_contract():
    for seed, order in itertools.product((0, 1), (1, 2, 3, 5)):
        model, _, _ = make(zipf_sentences(seed, 80, 12), order, extra=["never"])
        check_language_model(model, np.random.default_rng(seed), atol=1e-11)


def test_scores_are_the_distribution_read_off_word_by_word():
    model, vocabulary, _ = make(zipf_sentences(3, 100, 8), 4)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, len(vocabulary), (1, 30)))
    log_prob, _ = model.score_batch(tokens, torch.tensor([30]), model.start(1))
    for t in range(30):
        p = next_word_distribution(model, tokens[0, :t].numpy())[tokens[0, t]]
        assert log_prob[0, t].item() == pytest.approx(math.log(p), abs=1e-12)


def test_after_a_line_end_comes_a_sentence_start():
    model, vocabulary, _ = make(zipf_sentences(4, 60, 6), 4)
    w1, w2 = vocabulary.id_of["w1"], vocabulary.id_of["w2"]
    fresh, after = [], [w2, w1, vocabulary.eos]
    np.testing.assert_array_equal(next_word_distribution(model, fresh), next_word_distribution(model, after))
    np.testing.assert_array_equal(
        next_word_distribution(model, [w2]), next_word_distribution(model, [w1, vocabulary.eos, w2])
    )


@pytest.mark.parametrize("lines", [[[]], [["a"] * 50], [["a"]] * 40, [[], []]])
@pytest.mark.parametrize("order", [1, 2, 5, 9])
def test_texts_without_counts_of_counts_take_the_fallback(lines, order):
    model, vocabulary, _ = make(lines, order)
    for context in ([], [vocabulary.unk], [vocabulary.eos], [0] * 12):
        p = next_word_distribution(model, context)
        assert np.isfinite(p).all() and (p > 0).all() and abs(p.sum() - 1) < 1e-12
    assert FALLBACK_DISCOUNTS in model.discounts


def test_what_cannot_be_estimated_or_asked_is_refused():
    model, vocabulary, _ = make([["a"]], 2)
    text = encode([["a"]], vocabulary)
    with pytest.raises(ConfigError, match="order is 0"):
        estimate(text, vocabulary, 0)
    with pytest.raises(DataError, match="empty text"):
        estimate(Text(np.zeros(0, np.int32), np.zeros(1, np.int64), 0, 0, 0), vocabulary)
    with pytest.raises(DataError, match="word ids up to 7, expected below 3"):
        estimate(Text(np.array([7], np.int32), np.array([0, 1]), 0, 0, 2), vocabulary)
    for ids in ([3], [-1]):
        with pytest.raises(QueryError, match="expected 0 to 2"):
            next_word_distribution(model, ids)
        with pytest.raises(QueryError, match="expected 0 to 2"):
            model.score_batch(torch.tensor([ids]), torch.tensor([1]), model.start(1))


# Files


def assert_same_model(got, expected, rtol):
    assert got.vocabulary == expected.vocabulary and got.order == expected.order
    for a, b in zip(got.levels, expected.levels, strict=True):
        np.testing.assert_array_equal(a.keys, b.keys)
        np.testing.assert_allclose(a.log_prob, b.log_prob, rtol=rtol, atol=0)
        np.testing.assert_allclose(a.log_backoff, b.log_backoff, rtol=rtol, atol=0)


def test_lines_shorter_than_the_order():
    vocabulary = Vocabulary(("<eos>", "<unk>", "a", "b"))
    for lines in ([["a"], ["b"], ["a"]], [[], []], [["a", "b"], []]):
        text = encode(lines, vocabulary)
        long, short = (evaluate(estimate(text, vocabulary, order), text, "reset") for order in (7, 4))
        assert long.log_likelihood == pytest.approx(short.log_likelihood)


@pytest.mark.parametrize("name", ["model.arpa", "model.arpa.gz"])
@pytest.mark.parametrize("order", [1, 2, 4])
def test_arpa_round_trip(tmp_path, name, order):
    model, _, _ = make(zipf_sentences(5, 50), order, extra=["never", "été"])
    model.write_arpa(tmp_path / name)
    got = KneserNey.read_arpa(tmp_path / name)
    assert_same_model(got, model, rtol=1e-14)  # a change of base and back: a few units in the last place
    got.write_arpa(tmp_path / f"again-{name}")
    assert_same_model(KneserNey.read_arpa(tmp_path / f"again-{name}"), got, rtol=1e-14)
    assert sorted(os.listdir(tmp_path)) == sorted([name, f"again-{name}"])  # no temporary file is left


def test_run_folder_round_trip_is_exact(tmp_path):
    model, _, _ = make(zipf_sentences(6, 50), 3)
    save(model, tmp_path / "run")
    got = load_baseline(tmp_path / "run")
    assert_same_model(got, model, rtol=0)
    assert got.discounts == model.discounts and got.num_parameters == model.num_parameters


def test_damaged_run_folders_are_refused_in_one_line(tmp_path):
    model, vocabulary, _ = make(zipf_sentences(6, 50), 3)
    save(model, tmp_path)
    (tmp_path / "manifest.json").unlink()  # which would name the file first
    (tmp_path / "vocabulary.txt").write_text("<eos>\n<unk>\n")
    with pytest.raises(CheckpointError, match="do not belong together"):
        load_baseline(tmp_path)
    vocabulary.write(tmp_path / "vocabulary.txt")
    tables = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(tables[: len(tables) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        load_baseline(tmp_path)
    (tmp_path / "config.json").write_text('{"format_version": 99}')
    with pytest.raises(CheckpointError, match="format_version 99, expected 1"):
        load_baseline(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is damaged"):
        load_baseline(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="it has no config.json"):
        load_baseline(tmp_path)


ARPA = """\
remarks may stand here
\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1.0\t<unk>
-99\t<s>\t-0.5
-0.5\t</s>
-0.25 a -0.25

\\2-grams:
-0.125\t<s> a
-0.75\ta </s>

\\end\\
"""


def test_arpa_files_of_others_are_understood(tmp_path):
    path = tmp_path / "m.arpa"
    path.write_text(ARPA)
    model = KneserNey.read_arpa(path)
    assert model.vocabulary.words == ("<unk>", "<eos>", "a")
    start = np.log10(next_word_distribution(model, []))
    np.testing.assert_allclose(start, [-1.5, -1.0, -0.125])  # the back-off of <s> is -0.5
    np.testing.assert_allclose(np.log10(next_word_distribution(model, [2])), [-1.25, -0.75, -0.5])
    path.write_bytes(gzip.compress(ARPA.replace("-1.0\t<unk>\n", "").replace("1=4", "1=3").encode()))
    model = KneserNey.read_arpa(path)  # packed, and without <unk>
    assert next_word_distribution(model, [])[model.vocabulary.unk] == 0.0
    log_prob, _ = model.score_batch(torch.tensor([[model.vocabulary.unk, 1]]), torch.tensor([2]), model.start(1))
    assert log_prob[0, 0] == -math.inf and not log_prob.isnan().any()


@pytest.mark.parametrize(
    "old, new, message",
    [
        (ARPA, "", "line 1: the file ends here, expected .*truncated"),
        (ARPA, "hello\n", "line 1: the file ends here"),
        ("ngram 1=4", "ngram one=4", "line 3: 'ngram one=4', expected 'ngram 1=' and a number"),
        ("ngram 1=4\nngram 2=2\n", "", "line 4: no 'ngram 1=' line"),
        ("1=4", "1=5", "line 12: .*2-grams:' after 4 1-grams, expected 5"),
        ("2=2", "2=1", "line 14: more 2-grams than the header's 1"),
        ("2=2", "2=3", "line 16: .* after 2 2-grams, expected 3"),
        ("\\2-grams:", "\\3-grams:", "line 12: .*3-grams:', expected .2-grams:"),
        ("-0.5\t</s>", "x\t</s>", "line 9: .*expected numbers"),
        ("-0.5\t</s>", "0.5\t</s>", "line 9: .*at most 0"),
        ("-0.5\t</s>", "nan\t</s>", "line 9: .*at most 0"),
        ("a -0.25", "a inf", "line 10: .*finite"),
        ("-0.5\t</s>", "-0.5\t</s> a b c", "line 9: .*expected log10 p, 1 word"),
        ("-0.5\t</s>", "-0.5\ta", "line 10: a second unigram 'a'"),
        ("<s> a", "<s> b", "line 13: 'b' is no unigram"),
        ("a </s>", "<s> a", "line 14: the 2-gram is there twice"),
        ("\n\\end\\\n", "", "line 14: the file ends here, expected .end.; it looks truncated"),
        ("\\end\\", "\\ende\\", "line 16: .*expected .end"),
        ("2=2", "2=2\nngram 3=1", "line 17: .*expected .3-grams:"),
    ],
)
def test_broken_arpa_files_are_refused_with_their_line(tmp_path, old, new, message):
    path = tmp_path / "m.arpa"
    assert old in ARPA
    path.write_text(ARPA.replace(old, new))
    with pytest.raises(DataError, match=message) as caught:
        KneserNey.read_arpa(path)
    assert "\n" not in str(caught.value) and "m.arpa" in str(caught.value)


def test_arpa_needs_the_prefix_of_every_ngram_and_utf8(tmp_path):
    path = tmp_path / "m.arpa"
    trigram = ARPA.replace("2=2", "2=2\nngram 3=1").replace("\n\\end", "\n\\3-grams:\n-1\ta a a\n\\end")
    path.write_text(trigram)
    with pytest.raises(DataError, match="line 18: its first 2 words are no 2-gram"):
        KneserNey.read_arpa(path)
    path.write_bytes(ARPA.replace("a -0.25", "\xe9 -0.25").encode("latin-1"))
    with pytest.raises(DataError, match="line 10: not UTF-8"):
        KneserNey.read_arpa(path)
    with pytest.raises(DataError, match="no such file"):
        KneserNey.read_arpa(tmp_path / "absent")
    with pytest.raises(DataError, match="has a word </s>"):
        make([["</s>"]], 2)[0].write_arpa(path)


# KenLM's numbers, where the corpora are

DATA = os.environ.get("VLHMM_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="VLHMM_DATA names no folder with the corpora")


@pytest.fixture(scope="module")
def ptb():
    from vlhmm.data.corpora import load_corpus

    return load_corpus("ptb", DATA)


@needs_data
@pytest.mark.parametrize("order, test", [(2, 185.70), (3, 148.28), (4, 142.72), (5, 141.19)])
def test_ptb_agrees_with_lmplz(ptb, order, test):
    began = time.monotonic()
    model = estimate(ptb.train, ptb.vocabulary, order)
    assert evaluate(model, ptb.test, rule="reset").perplexity == pytest.approx(test, abs=0.006)
    assert time.monotonic() - began < 30  # 1 s on an idle machine
    if order == 5:
        assert evaluate(model, ptb.valid, rule="reset").perplexity == pytest.approx(148.01, abs=0.006)
        check_language_model(model, np.random.default_rng(0), max_words=0)
        rng = np.random.default_rng(0)
        for _ in range(5):
            start = rng.integers(ptb.test.num_tokens - 4)
            for ids in (ptb.test.tokens[start : start + 4], rng.integers(0, len(ptb.vocabulary), 4)):
                assert abs(next_word_distribution(model, ids).sum() - 1) < 1e-11


@needs_data
def test_wikitext_2_agrees_with_lmplz():
    from vlhmm.data.corpora import load_corpus

    corpus = load_corpus("wikitext-2", DATA)
    model = estimate(corpus.train, corpus.vocabulary, 5)
    assert evaluate(model, corpus.valid, rule="reset").perplexity == pytest.approx(234.9, abs=0.06)
    assert evaluate(model, corpus.test, rule="reset").perplexity == pytest.approx(220.1, abs=0.06)


def test_estimation_reads_what_learn_makes():
    vocabulary, text = learn([["a", "b"], [], ["a"]])
    model = estimate(text, vocabulary)
    assert model.order == 5 and evaluate(model, text, rule="reset").perplexity < len(vocabulary)


def test_fallback_discounts_are_told(tmp_path, capsys):
    (tmp_path / "text").write_text("the cat\nthe dog\n")
    text = str(tmp_path / "text")
    assert main(["baseline", "kn", text, "--valid", text, "--order", "2", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["settings"]["fallback_orders"] == [1, 2]
    assert "Kneser-Ney order 1, 2: the counts of counts allow no discounts" in err and err.count("\n") == 1
    assert main(["baseline", "kn", text, "--valid", text, "--order", "2", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    model, _, _ = make(zipf_sentences(1, 400), 3)
    assert model.fallback_orders == [n for n, d in enumerate(model.discounts, 1) if d == FALLBACK_DISCOUNTS] != [1, 2, 3]


@pytest.mark.parametrize("name", ["model.arpa", "model.arpa.gz"])
def test_commands_read_arpa_files(tmp_path, capsys, name):
    """evaluate, score, next and sample answer from an ARPA file as from the run it was written from."""
    (tmp_path / "text").write_text("the cat runs\nthe dog runs\na cat\n")
    text, run, arpa = str(tmp_path / "text"), str(tmp_path / "run"), str(tmp_path / name)
    assert main(["baseline", "kn", text, "--valid", text, "--out", run, "--arpa", arpa, "--quiet"]) == 0

    def told(*arguments):
        assert main([*arguments, "--quiet", "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    capsys.readouterr()
    for verb, rest in (("evaluate", [text]), ("score", [text]), ("next", ["the"])):
        ours, theirs = (told(verb, model, *rest) for model in (run, arpa))
        if verb == "evaluate":
            assert theirs["perplexity"] == pytest.approx(ours["perplexity"], rel=1e-12)
        elif verb == "score":
            assert [line["log_prob"] for line in theirs] == pytest.approx([line["log_prob"] for line in ours], rel=1e-12)
        else:
            assert {w["word"]: w["probability"] for w in theirs["words"]} == pytest.approx(
                {w["word"]: w["probability"] for w in ours["words"]}, rel=1e-12
            )
    assert told("sample", arpa, "-n", "2")[0]["ended"] in (True, False)
    assert main(["decode", arpa, text]) == 2
    assert "has no hidden states" in capsys.readouterr().err
    assert main(["score", text, text]) == 2
    assert "expected the folder of a run, or an n-gram model named .arpa" in capsys.readouterr().err
    assert main(["mix", arpa, run, "--valid", text, "--out", str(tmp_path / "mixed")]) == 2
    assert f"{arpa} is a file" in capsys.readouterr().err


def test_names_that_cannot_be_written_are_refused_before_anything_is_counted(tmp_path, capsys):
    (tmp_path / "file").write_text("a b\n")
    for option, name in (("--out", tmp_path / "file"), ("--arpa", tmp_path)):
        assert main(["baseline", "kn", "no such text", "--valid", "none", option, str(name)]) == 2
        error = capsys.readouterr().err
        assert option in error and str(name) in error and error.count("\n") == 1


def test_a_file_that_is_no_folder_is_not_looked_into(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="expected the folder of a run"):
        load_any(tmp_path / "pipe")

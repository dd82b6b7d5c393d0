"""The Python API: train, save, load, and the example of every public method."""

import doctest
import inspect
import subprocess
import sys

import pytest

import vlhmm
from vlhmm import api, language_model

SENTENCES = [
    f"{article} {noun} {verb} ." for article in ("the", "a") for noun in ("dog", "cat", "man") for verb in ("runs", "sleeps")
] * 8  # fmt: skip
TINY = {"preset": "tiny", "states": 16, "blocks": 4, "epochs": 3, "progress": False}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("api") / "run"
    return vlhmm.train(SENTENCES, out=out, **TINY)


@pytest.fixture
def names(trained, tmp_path):
    """What the examples in docstrings may use."""
    text_file = tmp_path / "text.txt"
    text_file.write_text("\n".join(SENTENCES[:24]) + "\n")
    return {"vlhmm": vlhmm, "model": trained, "run": trained.folder, "tmp": tmp_path, "text_file": text_file}


def public_functions():
    methods = inspect.getmembers(language_model.HMMLanguageModel, inspect.isfunction)
    found = [method for name, method in methods if not name.startswith("_")]
    return [*found, api.load, api.train]


NOT_QUERIES = {"start", "score_batch", "chain"}  # the LanguageModel protocol


@pytest.mark.parametrize("function", public_functions(), ids=lambda function: function.__name__)
def test_every_public_method_has_an_example_that_runs(function, names):
    examples = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs=names)
    count = sum(len(example.examples) for example in examples)
    assert count or function.__name__ in NOT_QUERIES, f"{function.__name__} has no example"
    for example in examples:
        failures = []
        doctest.DocTestRunner(verbose=False).run(example, out=failures.append, clear_globs=False)
        assert not failures, "".join(failures)


def test_public_signatures_have_no_any():
    for function in public_functions():
        signature = str(inspect.signature(function))
        assert "Any" not in signature, f"{function.__name__}{signature}"
        assert "return" in function.__annotations__, f"{function.__name__} has no return type"


def test_a_model_trained_in_memory_can_be_saved_and_loaded(tmp_path):
    model = vlhmm.train(iter(SENTENCES), **TINY)
    saved = model.save(tmp_path / "kept")
    again = vlhmm.load(saved)
    assert again.score("the dog runs .") == model.score("the dog runs .")
    with pytest.raises(vlhmm.ConfigError, match="not an empty folder"):
        model.save(saved)


def test_words_and_strings_and_files_train_the_same_model(trained, tmp_path):
    words = vlhmm.train([sentence.split() for sentence in SENTENCES], **TINY)
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES) + "\n")
    file = vlhmm.train(tmp_path / "text.txt", **TINY)
    for model in (words, file):
        assert model.score("a cat sleeps .") == trained.score("a cat sleeps .")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["only one"], "too few"),
        ([1, 2], "expected a string"),
        ([], "too few"),
    ],
)
def test_bad_texts_are_refused_in_one_line(texts, message):
    with pytest.raises(vlhmm.VlhmmError, match=message):
        vlhmm.train(texts, **TINY)


def test_repr_says_what_it_is(trained):
    assert "states=16" in repr(trained) and "blocks=4" in repr(trained)
    assert "<table>" in trained._repr_html_() and "16" in trained._repr_html_()


def test_results_turn_into_dicts(trained):
    (first,) = trained.next_word("the", top_k=1)
    assert first.to_dict() == {"word": first.word, "log_prob": first.log_prob}
    smoothed = trained.posteriors("the dog runs .").to_dict()["smoothed"]
    assert isinstance(smoothed, list) and isinstance(smoothed[0], list)


def test_loading_reads_each_file_once(trained, monkeypatch):
    from pathlib import Path

    from vlhmm.data.vocabulary import Vocabulary

    reads = []
    original = Vocabulary.read.__func__
    monkeypatch.setattr(
        Vocabulary, "read", classmethod(lambda cls, path: reads.append(Path(path).name) or original(cls, path))
    )
    vlhmm.load(trained.folder)
    assert reads == ["vocabulary.txt"]


@pytest.mark.parametrize("module", ["vlhmm.training.trainer", "numba"])
def test_loading_imports_neither_the_trainer_nor_the_compiler(trained, module):
    code = f"vlhmm.load({str(trained.folder)!r}); sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", f"import sys, vlhmm; {code}"]).returncode == 0

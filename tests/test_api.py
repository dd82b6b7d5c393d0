"""The Python API: train, save, load, and the example of every public method."""

import doctest
import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NoReturn, get_args, get_type_hints

import pytest
import torch

import vlhmm
from models import VOCABULARY, small_hmm
from vlhmm.distributions import HMMDistributions
from vlhmm.evaluation import protocol
from vlhmm.language_model import TextModel

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
    mixture = vlhmm.MixtureLanguageModel([trained, trained], [0.5, 0.5])
    return {
        "vlhmm": vlhmm,
        "torch": torch,
        "model": trained,
        "mixture": mixture,
        "run": trained.folder,
        "tmp": tmp_path,
        "text_file": text_file,
    }


def public_objects():
    """Every function and class that vlhmm exports, and every public method of the two models."""
    exported = [getattr(vlhmm, name) for name in vlhmm.__all__]
    functions = [each for each in exported if inspect.isfunction(each)]
    for model in (TextModel, vlhmm.HMMLanguageModel, vlhmm.MixtureLanguageModel):
        methods = inspect.getmembers(model, inspect.isfunction)
        functions += [
            method
            for name, method in methods
            if not name.startswith("_")
            and method.__qualname__.startswith(model.__name__)
            and not getattr(method, "__isabstractmethod__", False)
        ]
    answering = [each for each in functions if each.__annotations__["return"] is not NoReturn]
    return [*answering, vlhmm.Constraint]


INTERNAL = {"chain"}  # what training and queries share, not a question


@pytest.mark.parametrize("each", public_objects(), ids=lambda each: each.__qualname__)
def test_every_public_function_has_its_sections_and_an_example_that_runs(each, names):
    text = inspect.getdoc(each)
    if inspect.isfunction(each) and each.__name__ not in INTERNAL:
        parameters = set(inspect.signature(each).parameters) - {"self"}
        described = text.partition("Args:")[2].partition("Returns:" if "Returns:" in text else "Yields:")[0]
        assert each.__name__ == "start" or all(f"{name}: " in described for name in parameters), (
            f"{each.__qualname__} has undescribed arguments"
        )
        assert each.__name__ == "start" or "Returns:" in text or "Yields:" in text
    examples = doctest.DocTestFinder(recurse=False).find(each, each.__name__, globs=names)
    assert each.__name__ in INTERNAL or sum(len(example.examples) for example in examples), (
        f"{each.__qualname__} has no example"
    )
    for example in examples:
        failures = []
        doctest.DocTestRunner(verbose=False).run(example, out=failures.append, clear_globs=False)
        if each.__qualname__.startswith(TextModel.__name__):  # a mixture inherits it
            example.globs["model"] = names["mixture"]
            doctest.DocTestRunner(verbose=False).run(example, out=failures.append, clear_globs=False)
        assert not failures, "".join(failures)


INSIDE = ("vlhmm.hmm", "vlhmm.components")  # the parameters behind the distributions


def has_any(annotation):
    return annotation is Any or any(has_any(part) for part in get_args(annotation) if not isinstance(part, str | int))


def parts_of(annotation):
    """The classes of the package in an annotation."""
    if isinstance(annotation, list):
        return [each for part in annotation for each in parts_of(part)]
    if isinstance(annotation, type) and annotation.__module__.startswith("vlhmm."):
        return [annotation]
    return [each for part in get_args(annotation) for each in parts_of(part)]


def test_no_any_in_what_a_user_sees():
    """Follows every export to the classes that its signatures name, and to theirs."""
    names = {
        name: value
        for module in list(sys.modules.values())
        if module.__name__.startswith("vlhmm")
        for name, value in vars(module).items()
    }
    pandas = SimpleNamespace(DataFrame=object)
    todo = [TextModel, *(getattr(vlhmm, name) for name in vlhmm.__all__)]
    seen = set()
    while todo:
        each = todo.pop()
        if each in seen or each.__module__.startswith(INSIDE) or each is protocol.LanguageModel:
            continue  # the carry of the protocol is each model's own
        seen.add(each)
        members = [each]
        if inspect.isclass(each):
            public = [value for name, value in vars(each).items() if name == "__init__" or not name.startswith("_")]
            members += [
                getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value))) for value in public
            ]
        for member in members:
            if not (inspect.isfunction(member) or inspect.isclass(member)) or not member.__module__.startswith("vlhmm"):
                continue
            if getattr(member, "__isabstractmethod__", False):
                continue  # the protocol again
            scope = {**names, **vars(sys.modules[member.__module__]), "pandas": pandas, "Tokenizer": object}
            hints = get_type_hints(member, scope)
            found = [name for name, annotation in hints.items() if has_any(annotation) and not name.startswith("_")]
            assert not found, f"{member.__qualname__}: Any in {found}"
            if inspect.isfunction(member):
                untyped = set(inspect.signature(member).parameters) - {"self", "cls"} - set(hints)
                assert not untyped and "return" in hints, (
                    f"{member.__qualname__} lacks types of {untyped or 'its result'}"
                )
            todo += [part for annotation in hints.values() for part in parts_of(annotation)]
    assert {"Prefix", "Infilling", "Posteriors", "Report", "Vocabulary"} <= {each.__name__ for each in seen}


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


def test_repr_counts_no_padding():
    hmm, blocks = small_hmm("uneven-block-factored")  # 4 + 2 + 1 states in a table of 3 x 4
    distributions = HMMDistributions(hmm.potentials(), blocks)
    assert "states=7" in repr(vlhmm.HMMLanguageModel(VOCABULARY, distributions, "reset"))


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

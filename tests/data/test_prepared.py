"""Prepared texts: what is written is what is read, in parts or whole, and damage is noticed."""

import gzip
import json

import numpy as np
import pytest

from vlhmm.data.corpora import load_texts
from vlhmm.data.prepared import PreparedText, PreparedWriter, prepare
from vlhmm.data.text import encode, learn, read_lines
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import ConfigError, DataError

WORDS = ("the", "a", "dog", "cat", "runs", "sleeps", "ünï", "<unk>", "rare")


def lines_of(number: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS[:8], size=draw.integers(0, 9))) for _ in range(number)] + ["rare dog"]


@pytest.fixture
def texts(tmp_path):
    """Three files, two of them packed, and the same lines in one plain file."""
    zstandard = pytest.importorskip("zstandard")
    parts = ["".join(f"{line}\n" for line in lines_of(40, seed)).encode() for seed in range(3)]
    (tmp_path / "a.txt").write_bytes(parts[0])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(parts[1]))
    packed = zstandard.ZstdCompressor().compress(parts[2][:100]) + zstandard.ZstdCompressor().compress(parts[2][100:])
    (tmp_path / "c.txt.zst").write_bytes(packed)
    (tmp_path / "whole.txt").write_bytes(b"".join(parts))
    return [tmp_path / "a.txt", tmp_path / "b.txt.gz", tmp_path / "c.txt.zst"], tmp_path / "whole.txt"


def assert_same(prepared, text):
    assert prepared.num_tokens == text.num_tokens and prepared.num_sentences == text.num_sentences
    assert (prepared.num_oov, prepared.num_unk, prepared.num_bytes) == (text.num_oov, text.num_unk, text.num_bytes)
    for name in ("tokens", "offsets", "literal_unk"):
        np.testing.assert_array_equal(getattr(prepared, name), getattr(text, name))
    size = len(prepared.vocabulary)
    np.testing.assert_array_equal(prepared.word_counts(size), text.word_counts(size))
    np.testing.assert_array_equal(prepared.start_counts(size), text.start_counts(size))


@pytest.mark.parametrize("shard_tokens", [1, 50, 1 << 20])
@pytest.mark.parametrize("limits", [{}, {"max_vocab": 6}, {"min_count": 5}])
def test_several_files_are_one_text(texts, tmp_path, shard_tokens, limits):
    files, whole = texts
    prepared = prepare(files, tmp_path / "out", shard_tokens=shard_tokens, **limits)
    vocabulary, text = learn(read_lines(whole), limits.get("max_vocab"), limits.get("min_count", 1))
    assert prepared.vocabulary.words == vocabulary.words
    assert_same(prepared, text)
    assert all(shard.tokens >= shard_tokens for shard in prepared.shards[:-1])
    assert sorted(file.name for file in (tmp_path / "out").iterdir() if file.suffix == ".part") == []


def test_a_given_vocabulary(texts, tmp_path):
    files, whole = texts
    vocabulary = Vocabulary(("<eos>", "dog", "<unk>", "the"))
    prepared = prepare(files, tmp_path / "out", vocabulary, shard_tokens=64)
    assert_same(prepared, encode(read_lines(whole), vocabulary))
    with pytest.raises(ConfigError, match="one or the other"):
        prepare(files, tmp_path / "other", vocabulary, max_vocab=5)


def test_parts_are_the_text_in_order(texts, tmp_path):
    prepared = prepare(texts[0], tmp_path / "out", shard_tokens=200)
    for size in (1, 30, 1000):
        parts = prepared.parts(size)
        assert sum(part.tokens for part in parts) == prepared.num_tokens
        assert [prepared.read([part]).num_tokens for part in parts] == [part.tokens for part in parts]
        assert_arrays_equal(prepared.read(parts), prepared)
    few = [parts[0] for parts in (prepared.parts(30)[3:], prepared.parts(30)[-1:])]
    read = prepared.read(few)
    np.testing.assert_array_equal(read.tokens, np.concatenate([prepared.read([part]).tokens for part in few]))
    assert (read.tokens[read.literal_unk] == prepared.vocabulary.unk).all()
    np.testing.assert_array_equal(prepared.sentence(-1), prepared.tokens[prepared.offsets[-2] :])
    np.testing.assert_array_equal(prepared.sentence(70), prepared.tokens[slice(*prepared.offsets[70:72])])


def assert_arrays_equal(text, other):
    for name in ("tokens", "offsets", "literal_unk"):
        np.testing.assert_array_equal(getattr(text, name), getattr(other, name))


def test_words_beyond_the_limit_become_unk(tmp_path):
    (tmp_path / "t.txt").write_text("a b\nc a\nd d d\n")
    said: list[str] = []
    prepared = prepare([tmp_path / "t.txt"], tmp_path / "out", max_types=3, log=said.append)
    assert set(prepared.vocabulary.words) == {"a", "b", "c", "<eos>", "<unk>"}
    assert prepared.num_oov == 3 and "3 tokens" in said[0]


def test_a_writer_takes_texts_one_by_one(tmp_path):
    vocabulary, text = learn([["a", "b"], [], ["b", "c", "<unk>"]])
    with PreparedWriter(tmp_path / "out", vocabulary, shard_tokens=3) as writer:
        writer.add(text)
        writer.add(text)
    np.testing.assert_array_equal(PreparedText(tmp_path / "out").tokens, np.tile(text.tokens, 2))
    with pytest.raises(DataError, match="another vocabulary"), PreparedWriter(tmp_path / "x", Vocabulary(("<eos>", "<unk>"))) as writer:
        writer.add(text)
    with pytest.raises(DataError, match="no prepared text"):
        PreparedText(tmp_path / "x")


@pytest.mark.parametrize("name", ["00000.ids", "00001.ends", "00000.unk", "vocabulary.txt", "counts.u64", "prepared.json"])
def test_damage_is_noticed(texts, tmp_path, name):
    prepare(texts[0], tmp_path / "out", shard_tokens=200)
    path = tmp_path / "out" / name
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged|not the vocabulary"):
        read_everything(tmp_path / "out")
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match="damaged|not the vocabulary|expected"):
        read_everything(tmp_path / "out")
    path.unlink()
    with pytest.raises(DataError, match="missing|no prepared text|no such file|cannot read"):
        read_everything(tmp_path / "out")


HOSTILE = ('"x"', "[]", "{}", "null", "-7", "1" + "0" * 30, "NaN", "true", "1.5", "9" * 5000, "[" * 50_000)


@pytest.mark.parametrize("checksum", [True, False], ids=["with checksum", "without"])
def test_every_field_of_prepared_json_has_a_type_and_a_range(texts, tmp_path, checksum, caplog):
    prepare(texts[0], tmp_path / "out", shard_tokens=200)
    path = tmp_path / "out/prepared.json"
    about = json.loads(path.read_text())
    if not checksum:  # of an older version
        del about["checksum"]
        path.write_text(json.dumps(about))
        read_everything(tmp_path / "out")
        assert "has no checksum" in caplog.text
    fields = [(name,) for name in about if name != "sources"]
    shard = about["shards"][0]
    fields += [("shards", 0), *(("shards", 0, name) for name in shard), *(("shards", 0, "sha256", name) for name in shard["sha256"])]
    for field in fields:
        for value in HOSTILE:
            copy = json.loads(json.dumps(about))
            inside = copy
            for key in field[:-1]:
                inside = inside[key]
            if json.dumps(inside[field[-1]]) == value:
                continue  # no tokenizer: null
            inside[field[-1]] = "@"
            path.write_text(json.dumps(copy).replace('"@"', value))
            if not checksum and field == ("counts_sha256",) and value == "null":
                continue  # as in an older version: the counts are compared with the text alone
            with pytest.raises(DataError) as error:
                read_everything(tmp_path / "out")
            assert len(str(error.value)) < 600 and "prepare" in str(error.value), (field, value)


@pytest.mark.parametrize("name", ["oov", "bytes"])
def test_changed_totals_are_noticed(texts, tmp_path, name):
    """Nothing but the checksum of prepared.json can tell."""
    prepare(texts[0], tmp_path / "out")
    path = tmp_path / "out/prepared.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {name: about[name] + 1}))
    with pytest.raises(DataError, match="does not match its own checksum"):
        PreparedText(tmp_path / "out")


def test_counts_with_the_right_sum_are_noticed(texts, tmp_path):
    prepare(texts[0], tmp_path / "out")
    path = tmp_path / "out/counts.u64"
    counts = np.fromfile(path, "<u8")
    counts[[0, 1]] = counts[[1, 0]]
    path.write_bytes(counts.tobytes())
    with pytest.raises(DataError, match="does not match its checksum"):
        read_everything(tmp_path / "out")


def read_everything(path):
    text = PreparedText(path)
    return text.tokens, text.offsets, text.literal_unk, text.word_counts(len(text.vocabulary))


def test_a_folder_in_use_is_refused(texts, tmp_path):
    prepare(texts[0], tmp_path / "out")
    with pytest.raises(DataError, match="holds a prepared text already"):
        prepare(texts[0], tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.doc").write_text("x")
    with pytest.raises(DataError, match="is not empty"):
        prepare(texts[0], tmp_path / "other")


def test_a_failed_preparation_can_be_repeated(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"a b\n\xff\n")
    (tmp_path / "good.txt").write_text("a b\n")
    (tmp_path / "empty.txt").write_text("\n\n")
    for bad in ("bad.txt", "empty.txt"):
        with pytest.raises(DataError, match="not UTF-8|empty lines"):
            prepare([tmp_path / bad], tmp_path / "out")
    assert prepare([tmp_path / "good.txt"], tmp_path / "out").num_tokens == 3


def test_another_format_version_is_refused(texts, tmp_path):
    prepare(texts[0], tmp_path / "out")
    about = json.loads((tmp_path / "out/prepared.json").read_text())
    (tmp_path / "out/prepared.json").write_text(json.dumps(about | {"format_version": 7}))
    with pytest.raises(DataError, match="format version 7"):
        PreparedText(tmp_path / "out")


def test_a_cut_off_zst_is_an_error(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.ZstdCompressor().compress(b"a b c\n" * 999)
    for content, message in ((packed[:-5], "cut off"), (b"(\xb5/\xfd" + b"\xff" * 9, "cannot read")):
        (tmp_path / "t.zst").write_bytes(content)
        with pytest.raises(DataError, match=message):
            list(read_lines(tmp_path / "t.zst"))
    (tmp_path / "t.zst").write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        list(read_lines(tmp_path / "t.zst"))


def test_a_corpus_from_a_prepared_text(texts, tmp_path):
    prepare(texts[0], tmp_path / "out", max_vocab=7)
    (tmp_path / "v.txt").write_text("the dog\nnew word\n")
    corpus = load_texts(tmp_path / "out", tmp_path / "v.txt")
    assert isinstance(corpus.train, PreparedText) and corpus.valid.num_oov == 2
    with pytest.raises(ConfigError, match="give max_vocab"):
        load_texts(tmp_path / "out", tmp_path / "v.txt", max_vocab=9)
    with pytest.raises(DataError, match="another vocabulary"):
        load_texts(tmp_path / "out", tmp_path / "v.txt", vocabulary=Vocabulary(("<eos>", "<unk>", "x")))

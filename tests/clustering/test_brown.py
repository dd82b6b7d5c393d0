"""Brown clustering, exchange and `vlhmm cluster`, tested against counting pairs of words one by one."""

import argparse
import collections
import io
import itertools
import json
import math
import os
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlhmm.cli import cluster
from vlhmm.clustering import _kernels
from vlhmm.clustering.bigrams import (
    average_mutual_information,
    class_pairs_of,
    count_bigrams,
    count_bigrams_of_arrays,
    count_class_pairs,
)
from vlhmm.clustering.brown import block_order, merge_classes, merge_words, number_blocks, paths_of_merges, place_unseen
from vlhmm.clustering.cluster import cluster_words
from vlhmm.clustering.exchange import exchange
from vlhmm.clustering.paths import read_paths
from vlhmm.errors import ConfigError, DataError

# Sums are of numbers rounded to 2^-24; a text here has fewer than a hundred pairs.
TOLERANCE = 1e-6


def ami_by_hand(tokens, class_of):
    """The oracle: bits of mutual information between the classes of adjacent tokens, from the definition."""
    pairs = collections.Counter((class_of[v], class_of[w]) for v, w in itertools.pairwise(tokens))
    total = sum(pairs.values())
    first, second = collections.Counter(), collections.Counter()
    for (i, j), count in pairs.items():
        first[i] += count
        second[j] += count
    return sum(n / total * math.log2(n * total / (first[i] * second[j])) for (i, j), n in pairs.items())


def merged(class_of, kept, absorbed):
    return {word: kept if label == absorbed else label for word, label in class_of.items()}


def divisions(block_of_word):
    """The classes as sets of words."""
    words = collections.defaultdict(set)
    for word, block in enumerate(block_of_word.tolist()):
        words[block].add(word)
    return {frozenset(members) for members in words.values()}


@st.composite
def texts(draw, max_words=6, max_tokens=30):
    """(tokens, vocab_size, num_blocks), with words that may not occur."""
    vocab_size = draw(st.integers(1, max_words))
    tokens = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_tokens))
    num_blocks = draw(st.integers(1, len(set(tokens))))
    return np.array(tokens), vocab_size, num_blocks


# ---- the measure


def test_mutual_information_by_hand():
    # a b a b a: half the pairs are (a, b), half (b, a), so the next class is known: one bit
    assert average_mutual_information(np.array([0, 1, 0, 1, 0]), np.array([0, 1]), 2) == pytest.approx(1.0)
    assert average_mutual_information(np.array([0, 1, 0, 1, 0]), np.array([0, 0]), 1) == 0.0
    # a a b: pairs (a, a) and (a, b); the first word tells nothing
    assert average_mutual_information(np.array([0, 0, 1]), np.array([0, 1]), 2) == pytest.approx(0.0)
    assert average_mutual_information(np.array([0]), np.array([0]), 1) == 0.0


@settings(deadline=None)
@given(text=texts(), data=st.data())
def test_mutual_information_is_its_definition(text, data):
    tokens, vocab_size, num_blocks = text
    classes = data.draw(st.lists(st.integers(0, num_blocks - 1), min_size=vocab_size, max_size=vocab_size))
    expected = ami_by_hand(tokens, classes) if len(tokens) > 1 else 0.0
    found = average_mutual_information(tokens, np.array(classes), num_blocks)
    assert found == pytest.approx(expected, abs=1e-12)  # float64


@settings(deadline=None)
@given(text=texts())
def test_bigrams_are_counted_from_both_sides(text):
    tokens, vocab_size, _ = text
    bigrams = count_bigrams(tokens, vocab_size)
    expected = collections.Counter(itertools.pairwise(tokens.tolist()))
    after, before = collections.Counter(), collections.Counter()
    for word in range(vocab_size):
        for p in range(bigrams.after_start[word], bigrams.after_start[word + 1]):
            after[word, int(bigrams.after_word[p])] += int(bigrams.after_count[p])
        for p in range(bigrams.before_start[word], bigrams.before_start[word + 1]):
            before[int(bigrams.before_word[p]), word] += int(bigrams.before_count[p])
        assert bigrams.twice_count[word] == expected[word, word]
    assert after == before == expected
    assert bigrams.num_pairs == len(tokens) - 1


# ---- Brown's algorithm


def brown_clusters(tokens, vocab_size, num_blocks):
    bigrams = count_bigrams(tokens, vocab_size)
    return number_blocks(merge_words(bigrams, num_blocks).block_of_word, bigrams.word_count, num_blocks)


def test_letters_and_digits_by_hand():
    # x and y stand before digits only, 1 and 2 before letters only: two classes lose nothing of one bit
    words = ["x", "y", "1", "2"]
    tokens = np.array([words.index(c) for c in "x1x2y1y2x1y2x2y1x"])
    blocks = brown_clusters(tokens, 4, 2)
    assert blocks[0] == blocks[1] != blocks[2] == blocks[3]
    assert average_mutual_information(tokens, blocks, 2) == pytest.approx(1.0, abs=0.01)


def test_a_merge_by_hand():
    # a b a c a: merging b and c loses nothing, any other pair everything
    tokens = np.array([0, 1, 0, 2, 0])
    brown = merge_words(count_bigrams(tokens, 3), 2)
    assert brown.merges.tolist() == [[1, 2]]
    assert brown.losses == pytest.approx([0.0], abs=TOLERANCE)
    assert brown.block_of_word[1] == brown.block_of_word[2] != brown.block_of_word[0]


@settings(deadline=None)
@given(text=texts())
def test_every_merge_of_words_is_the_cheapest(text):
    tokens, vocab_size, num_blocks = text
    if len(tokens) < 2:
        return
    brown = merge_words(count_bigrams(tokens, vocab_size), num_blocks)
    counts = collections.Counter(tokens.tolist())
    order = sorted(counts, key=lambda word: (-counts[word], word))
    class_of = dict.fromkeys(order, "waiting")
    for word in order[:num_blocks]:
        class_of[word] = word
    merges = list(zip(brown.merges.tolist(), brown.losses, strict=True))
    assert len(merges) == len(order) - num_blocks
    for word, ((kept, absorbed), loss) in zip(order[num_blocks:], merges, strict=True):
        class_of[word] = word
        before = ami_by_hand(tokens, class_of)
        labels = set(class_of.values()) - {"waiting"}
        losses = {
            frozenset(pair): before - ami_by_hand(tokens, merged(class_of, *pair))
            for pair in itertools.combinations(labels, 2)
        }
        assert losses[frozenset((kept, absorbed))] == pytest.approx(loss, abs=TOLERANCE)
        assert loss == pytest.approx(min(losses.values()), abs=TOLERANCE)
        class_of = merged(class_of, kept, absorbed)
    blocks = brown.block_of_word
    for v, w in itertools.combinations(order, 2):
        assert (class_of[v] == class_of[w]) == (blocks[v] == blocks[w])
    assert all(blocks[word] == -1 for word in set(range(vocab_size)) - set(order))
    assert sorted(set(blocks[order].tolist())) == list(range(num_blocks))


@settings(deadline=None)
@given(text=texts())
def test_every_merge_of_classes_is_the_cheapest_and_the_tree_is_theirs(text):
    tokens, vocab_size, _ = text
    if len(tokens) < 2:
        return
    tree = merge_classes(count_class_pairs(tokens, np.arange(vocab_size), vocab_size))
    class_of = {word: word for word in range(vocab_size)}
    for (kept, absorbed), loss in zip(tree.merges.tolist(), tree.losses, strict=True):
        before = ami_by_hand(tokens, class_of)
        losses = {
            pair: before - ami_by_hand(tokens, merged(class_of, *pair))
            for pair in itertools.combinations(sorted(set(class_of.values())), 2)
        }
        assert losses[kept, absorbed] == pytest.approx(loss, abs=TOLERANCE)
        assert loss == pytest.approx(min(losses.values()), abs=TOLERANCE)
        class_of = merged(class_of, kept, absorbed)
    assert len(set(class_of.values())) == 1
    assert tree.paths == paths_of_merges(tree.merges, vocab_size)


def test_paths_by_hand():
    # 1 and 2 first, then 0 with both: 0 is "0", the others are below "1"
    assert paths_of_merges(np.array([[1, 2], [0, 1]]), 3) == ("0", "10", "11")
    assert paths_of_merges(np.zeros((0, 2), dtype=int), 1) == ("0",)


@settings(deadline=None)
@given(text=texts())
def test_paths_are_the_leaves_of_a_full_tree(text):
    tokens, vocab_size, num_blocks = text
    paths = cluster_words(tokens, vocab_size, num_blocks).paths
    assert len(set(paths)) == num_blocks
    assert not any(a != b and b.startswith(a) for a, b in itertools.product(paths, paths))
    assert num_blocks == 1 or sum(2.0 ** -len(path) for path in paths) == 1.0


def test_a_table_too_short_for_the_counts_changes_nothing(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 30, 2_000) // np.array([1, 3] * 1_000)
    expected = cluster_words(tokens, 30, 5)
    monkeypatch.setattr(_kernels, "TABLE_SIZE", 8)
    found = cluster_words(tokens, 30, 5)
    assert len(_kernels.xlogx_table(2_000)) == 8
    assert found.block_of_word.tolist() == expected.block_of_word.tolist()
    assert found.paths == expected.paths


# ---- words the text does not hold


def test_an_unseen_word_joins_the_block_of_most_rare_words():
    counts = np.array([9, 1, 5, 1, 1, 0, 7])
    blocks = np.array([0, 0, 1, 1, 1, -1, 0])
    assert place_unseen(blocks, counts, 2).tolist() == [0, 0, 1, 1, 1, 1, 0]
    assert blocks[5] == -1  # what was given stays
    # one rare word each: the block with more words
    assert place_unseen(np.array([0, 0, 1, -1]), np.array([3, 1, 1, 0]), 2).tolist() == [0, 0, 1, 0]
    assert place_unseen(np.array([0, 1, 1, -1]), np.array([1, 1, 3, 0]), 2).tolist() == [0, 1, 1, 1]


# ---- numbering


def test_blocks_are_numbered_by_falling_token_count():
    found = number_blocks(np.array([2, 0, 1, 0]), np.array([1, 4, 3, 1]), 3)
    assert found.tolist() == [2, 0, 1, 0]
    found = number_blocks(np.array([0, 1, 2, 1]), np.array([1, 4, 9, 1]), 3)
    assert found.tolist() == [2, 1, 0, 1]
    # equal counts: by first word, or as the paths say
    assert number_blocks(np.array([1, 0]), np.array([2, 2]), 2).tolist() == [0, 1]
    assert block_order(np.array([1, 0]), np.array([2, 2]), 2).tolist() == [1, 0]
    assert block_order(np.array([1, 0]), np.array([2, 2]), 2, ("0", "1")).tolist() == [0, 1]


@settings(deadline=None)
@given(text=texts())
def test_every_word_has_a_block_and_every_block_a_word_that_occurs(text):
    tokens, vocab_size, num_blocks = text
    result = cluster_words(tokens, vocab_size, num_blocks)
    assert result.block_of_word.shape == (vocab_size,)
    tokens_of_block = np.bincount(result.block_of_word[tokens], minlength=num_blocks)
    assert len(tokens_of_block) == num_blocks
    assert tokens_of_block.min() > 0
    assert (np.diff(tokens_of_block) <= 0).all()


@settings(deadline=None)
@given(text=texts())
def test_the_result_says_what_it_is(text):
    tokens, vocab_size, num_blocks = text
    result = cluster_words(tokens.astype(np.int32), vocab_size, num_blocks)
    class_of = result.block_of_word.tolist()
    expected = ami_by_hand(tokens, class_of) if len(tokens) > 1 else 0.0
    assert result.ami_bits == pytest.approx(expected, abs=TOLERANCE)
    alone = cluster_words(tokens, vocab_size, num_blocks, sweeps=0)
    assert result.brown_ami_bits == pytest.approx(alone.ami_bits, abs=TOLERANCE)
    assert alone.num_moves == ()
    # the same classes, though those of equal count may be numbered otherwise
    assert divisions(alone.block_of_word) == divisions(brown_clusters(tokens, vocab_size, num_blocks))
    assert result.word_count.tolist() == np.bincount(tokens, minlength=vocab_size).tolist()
    assert paths_of_merges(result.merges, num_blocks) == result.paths


def test_the_same_text_gives_the_same_classes():
    tokens = np.random.default_rng(1).zipf(1.5, 3_000) % 200
    one, two = (cluster_words(tokens.astype(kind), 200, 12) for kind in (np.int32, np.int64))
    assert one.block_of_word.tolist() == two.block_of_word.tolist()
    assert (one.paths, one.ami_bits, one.num_moves) == (two.paths, two.ami_bits, two.num_moves)


# ---- exchange


@settings(deadline=None)
@given(text=texts(max_words=8, max_tokens=60), data=st.data())
def test_a_word_moves_to_the_best_class(text, data):
    tokens, vocab_size, num_blocks = text
    if len(tokens) < 2:
        return
    seen = sorted(set(tokens.tolist()))
    some = data.draw(st.lists(st.integers(0, num_blocks - 1), min_size=vocab_size, max_size=vocab_size))
    for block, word in enumerate(seen[:num_blocks]):
        some[word] = block  # no class is empty
    word = data.draw(st.sampled_from(seen))
    classes = np.array(some)
    pairs = count_class_pairs(tokens, classes, num_blocks)
    transposed = np.ascontiguousarray(pairs.T)
    first, second = pairs.sum(axis=1), pairs.sum(axis=0)
    sizes = np.bincount(classes[seen], minlength=num_blocks)
    alone = sizes[classes[word]] == 1
    bigrams = count_bigrams(tokens, vocab_size)
    table = _kernels.xlogx_table(len(tokens))
    order = np.array([word])
    moved, gained = _kernels.exchange_words(table, bigrams, order, classes, pairs, transposed, first, second, sizes)
    options = [ami_by_hand(tokens, [*some[:word], block, *some[word + 1 :]]) for block in range(num_blocks)]
    best = options[some[word]] if alone else max(options)
    assert ami_by_hand(tokens, classes.tolist()) == pytest.approx(best, abs=TOLERANCE)
    gain_bits = gained / (_kernels.UNIT * math.log(2) * (len(tokens) - 1))
    assert gain_bits == pytest.approx(best - options[some[word]], abs=TOLERANCE)
    assert moved == (classes[word] != some[word])
    # the tables still are what counting again would give
    np.testing.assert_array_equal(pairs, count_class_pairs(tokens, classes, num_blocks))
    np.testing.assert_array_equal(transposed, pairs.T)
    np.testing.assert_array_equal(first, pairs.sum(axis=1))
    np.testing.assert_array_equal(second, pairs.sum(axis=0))
    np.testing.assert_array_equal(sizes, np.bincount(classes[seen], minlength=num_blocks))


@settings(deadline=None)
@given(text=texts())
def test_exchange_ends_where_no_single_move_gains(text):
    tokens, vocab_size, num_blocks = text
    if len(tokens) < 2:
        return
    bigrams = count_bigrams(tokens, vocab_size)
    start = number_blocks(merge_words(bigrams, num_blocks).block_of_word, bigrams.word_count, num_blocks)
    result = exchange(bigrams, start, num_blocks, sweeps=100)
    classes = result.block_of_word.tolist()
    reached = ami_by_hand(tokens, classes)
    assert reached - ami_by_hand(tokens, start.tolist()) == pytest.approx(result.gain_bits.sum(), abs=TOLERANCE)
    assert result.gain_bits.min() >= 0
    assert result.num_moves[-1] == 0
    sizes = collections.Counter(classes[word] for word in set(tokens.tolist()))
    for word in set(tokens.tolist()):
        for block in range(num_blocks):
            if sizes[classes[word]] > 1:
                moved = [*classes[:word], block, *classes[word + 1 :]]
                assert ami_by_hand(tokens, moved) <= reached + TOLERANCE


def test_exchange_stops_after_its_sweeps():
    tokens = np.random.default_rng(2).integers(0, 50, 1_000)
    bigrams = count_bigrams(tokens, 50)
    start = np.arange(50) % 4
    assert exchange(bigrams, start, 4, sweeps=0).block_of_word.tolist() == start.tolist()
    one, two = (exchange(bigrams, start, 4, sweeps=sweeps) for sweeps in (1, 2))
    assert (len(one.num_moves), len(two.num_moves)) == (1, 2)
    assert two.num_moves[0] == one.num_moves[0] > 0
    again = exchange(bigrams, one.block_of_word, 4, sweeps=1)
    assert again.block_of_word.tolist() == two.block_of_word.tolist()
    assert start.tolist() == (np.arange(50) % 4).tolist()  # what was given stays


def test_progress_is_told_in_order():
    told = []
    tokens = np.random.default_rng(3).integers(0, 600, 3_000)
    cluster_words(tokens, 600, 4, sweeps=2, progress=lambda *step: told.append(step))
    seen = len(set(tokens.tolist()))
    assert [stage for stage, _ in itertools.groupby(told, key=lambda step: step[0])] == [
        "merging",
        "exchange sweep 1",
        "exchange sweep 2",
    ]
    for _, steps in itertools.groupby(told, key=lambda step: step[0]):
        done = [step[1] for step in steps]
        assert done == sorted(set(done))
        assert done[-1] == seen
    assert {total for _, _, total in told} == {seen}


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], 3, 1), DataError, "no tokens"),
        (([0, 3], 3, 1), DataError, "token 3 is not a word id of a vocabulary of 3"),
        (([0, -1], 3, 1), DataError, "token -1"),
        (([0.5], 3, 1), DataError, "word ids"),
        (([[0, 1]], 3, 1), DataError, "one row"),
        (([0, 1, 0], 3, 3), ConfigError, "num_blocks=3 is more than the 2 different words.*at most 2 blocks"),
        (([0, 1], 3, 0), ConfigError, "num_blocks=0"),
        (([0, 1], 3, 1, -1), ConfigError, "sweeps=-1"),
    ],
)
def test_what_cannot_be_clustered_is_refused(arguments, error, message):
    tokens, *rest = arguments
    tokens = np.array(tokens) if tokens else np.zeros(0, dtype=int)
    with pytest.raises(error, match=message):
        cluster_words(tokens, *rest)


def test_classes_out_of_range_are_refused():
    bigrams = count_bigrams(np.array([0, 1, 2]), 3)
    for wrong in ([0, 1, 2], [0, 1, -1]):
        with pytest.raises(ConfigError, match="expected 0 to 1"):
            exchange(bigrams, np.array(wrong), 2)
        with pytest.raises(ConfigError, match="expected 0 to 1"):
            average_mutual_information(np.array([0, 1]), np.array(wrong), 2)
    with pytest.raises(ConfigError, match="sweeps=-1"):
        exchange(bigrams, np.array([0, 1, 1]), 2, sweeps=-1)


# ---- the command


def run_cluster(*arguments):
    parser = argparse.ArgumentParser()
    cluster.add_options(parser)
    return cluster.run(parser.parse_args([*map(str, arguments)]))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    lines = ["the cat sat on the mat", "the dog sat on the cat", "a dog ran", "a cat ran to the mat"]
    path.write_text("\n".join(lines * 3) + "\n")
    return path


def test_the_command_writes_a_paths_file_to_standard_output(text_file, tmp_path, capsys):
    assert run_cluster(text_file, "--blocks", 4) == 0
    written = capsys.readouterr()
    assert "11 types in 4 blocks" in written.err
    (tmp_path / "paths").write_text(written.out)
    words = ["the", "cat", "dog", "mat", "sat", "ran", "on", "to", "a", "<eos>", "<unk>"]
    found = read_paths(tmp_path / "paths", words)
    assert found.num_blocks == 4
    assert found.word_count.tolist() == [15, 9, 6, 6, 6, 6, 6, 3, 6, 12, 0]


def test_the_command_reads_standard_input_and_is_quiet_if_asked(text_file, capsys, monkeypatch):
    run_cluster(text_file, "--blocks", 4)
    expected = capsys.readouterr().out
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(text_file.read_bytes())))
    monkeypatch.setattr(sys, "stdin", stdin)
    run_cluster("-", "--blocks", 4, "--quiet")
    written = capsys.readouterr()
    assert (written.out, written.err) == (expected, "")


def test_the_command_answers_in_json(text_file, tmp_path, capsys):
    out = tmp_path / "paths.txt"
    run_cluster(text_file, "--blocks", 3, "--out", out, "--format", "json")
    report = json.loads(capsys.readouterr().out)
    assert report["types"] == 11
    assert report["tokens"] == 75
    assert report["blocks"] == 3
    assert report["out"] == str(out)
    assert report["ami_bits"] >= report["brown_ami_bits"] > 0
    assert 0 <= report["seconds"] < 60
    assert len(out.read_text().splitlines()) == 11
    run_cluster(text_file, "--blocks", 3, "--format", "json")
    clusters = json.loads(capsys.readouterr().out)["clusters"]
    listed = [f"{cluster['path']}\t{word}" for cluster in clusters for word in cluster["words"]]
    assert sorted(listed) == sorted(line.rsplit("\t", 1)[0] for line in out.read_text().splitlines())


def test_the_command_writes_only_to_the_file_if_there_is_one(text_file, tmp_path, capsys):
    run_cluster(text_file, "--blocks", 4)
    expected = capsys.readouterr().out
    run_cluster(text_file, "--blocks", 4, "--out", tmp_path / "paths.txt")
    assert capsys.readouterr().out == ""
    assert (tmp_path / "paths.txt").read_text() == expected


def test_the_command_cuts_the_vocabulary(text_file, capsys):
    run_cluster(text_file, "--blocks", 2, "--max-vocab", 4, "--format", "json")
    assert json.loads(capsys.readouterr().out)["types"] == 4
    run_cluster(text_file, "--blocks", 2, "--min-count", 9, "--format", "json")
    report = json.loads(capsys.readouterr().out)
    assert (report["types"], report["oov"]) == (4, 39)  # the, <eos>, cat, <unk>


def test_the_command_without_sweeps_is_brown_alone(text_file, capsys):
    run_cluster(text_file, "--blocks", 3, "--format", "json", "--sweeps", 0)
    report = json.loads(capsys.readouterr().out)
    assert report["moves"] == []
    assert report["ami_bits"] == report["brown_ami_bits"]


def test_the_command_refuses_more_blocks_than_words(text_file):
    with pytest.raises(ConfigError, match="num_blocks=50"):
        run_cluster(text_file, "--blocks", 50)


def test_the_command_takes_a_file_before_a_corpus_of_its_name(text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="ptb has a fixed vocabulary"):
        run_cluster("ptb", "--blocks", 2, "--max-vocab", 4)
    os.rename(text_file, "ptb")
    run_cluster("ptb", "--blocks", 2, "--max-vocab", 4, "--format", "json")
    assert json.loads(capsys.readouterr().out)["types"] == 4


# ---- a corpus


@pytest.mark.skipif("VLHMM_DATA" not in os.environ, reason="needs the corpora: set VLHMM_DATA")
def test_penn_treebank_beats_wcluster(capsys, tmp_path):
    began = time.process_time()  # of this process: others may keep the machine busy
    run_cluster("ptb", "--blocks", 128, "--format", "json", "--out", tmp_path / "paths")
    report = json.loads(capsys.readouterr().out)
    assert report["types"] == 10_000
    assert report["tokens"] == 929_589
    assert report["ami_bits"] >= 1.40  # wcluster: 1.383
    assert report["brown_ami_bits"] >= 1.37
    assert time.process_time() - began < 30  # compilation included; 3 s without
    # the file alone, read back, gives the same figure
    words = [line.split("\t")[1] for line in (tmp_path / "paths").read_text().splitlines()]
    found = read_paths(tmp_path / "paths", words)
    assert found.num_blocks == 128
    id_of = {word: index for index, word in enumerate(words)}
    with open(os.path.join(os.environ["VLHMM_DATA"], "ptb", "ptb.train.txt")) as lines:
        tokens = np.array([id_of[word] for line in lines for word in [*line.split(), "<eos>"]])
    reread = average_mutual_information(tokens, found.block_of_word, 128)
    assert reread == pytest.approx(report["ami_bits"], abs=1e-9)  # another order of summation


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_bigrams_of_arrays_are_those_of_the_whole_text(chunk):
    draw = np.random.default_rng(chunk)
    for length in (1, 2, 3, 40, 500):
        tokens = draw.integers(0, 9, size=length)
        cuts = np.sort(draw.integers(0, length + 1, size=3))
        arrays = [part.astype(np.uint16) for part in np.split(tokens, cuts)]  # some of them empty
        found, expected = count_bigrams_of_arrays(arrays, 11, chunk), count_bigrams(tokens, 11)
        for name, array, other in zip(expected._fields, found, expected, strict=True):
            np.testing.assert_array_equal(array, other, err_msg=f"{name} of {length} tokens")
        classes = draw.integers(0, 3, size=11)
        np.testing.assert_array_equal(class_pairs_of(found, classes, 3), count_class_pairs(tokens, classes, 3))
    with pytest.raises(DataError, match="no tokens"):
        count_bigrams_of_arrays([tokens[:0]], 11)


def test_clusters_of_arrays_are_those_of_the_whole_text():
    tokens = np.random.default_rng(3).zipf(1.3, size=20_000) % 200
    whole = cluster_words(tokens, 201, 12, sweeps=3)
    parts = cluster_words(iter(np.array_split(tokens.astype(np.uint16), 7)), 201, 12, sweeps=3)
    np.testing.assert_array_equal(parts.block_of_word, whole.block_of_word)
    assert parts.paths == whole.paths and parts.ami_bits == whole.ami_bits and parts.num_moves == whole.num_moves

"""Blocks, their files, and assignments that need no clustering."""

import os
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlhmm.clustering.assignments import frequency_blocks
from vlhmm.clustering.blocks import Blocks, allocate_states
from vlhmm.clustering.paths import read_paths, write_paths
from vlhmm.errors import ConfigError, DataError, VlhmmError

WORDS = ["the", "#", "<eos>", "ünï", "<unk>"]


@st.composite
def partitions(draw):
    """What `Blocks.partition_of` takes."""
    num_blocks = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, num_blocks - 1), max_size=4))
    block_of_word = draw(st.permutations([*range(num_blocks), *extra]))
    states_per_block = draw(st.integers(1, 4))
    alive = draw(st.lists(st.integers(1, states_per_block), min_size=num_blocks, max_size=num_blocks))
    return block_of_word, num_blocks, states_per_block, alive


# ---- structure


def test_a_partition_by_hand():
    blocks = Blocks.partition_of([1, 0, 1], num_blocks=2, states_per_block=3, num_alive=[2, 3])
    assert blocks.states_of_block.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert blocks.block_of_word.tolist() == [1, 0, 1]
    assert (blocks.num_states, blocks.num_real_states) == (6, 5)
    assert (blocks.vocab_size, blocks.num_blocks, blocks.states_per_block) == (3, 2, 3)
    assert blocks.alive.tolist() == [[True, True, False], [True, True, True]]
    order, sizes = blocks.words_by_block
    assert (order.tolist(), sizes.tolist()) == ([1, 0, 2], [1, 2])
    assert blocks.words_of_block(1).tolist() == [0, 2]
    assert blocks.partition


def test_a_partition_without_num_alive_has_every_slot():
    blocks = Blocks.partition_of(np.array([0, 1], dtype=np.int32), 2, 4)
    assert blocks.num_alive.tolist() == [4, 4]
    assert blocks.num_real_states == blocks.num_states == 8
    assert blocks.block_of_word.dtype == blocks.states_of_block.dtype == blocks.num_alive.dtype == np.int64


def test_a_partition_does_not_share_memory_with_what_it_was_made_of():
    given_blocks = np.array([0, 1])
    blocks = Blocks.partition_of(given_blocks, 2, 1)
    given_blocks[0] = 1
    assert blocks.block_of_word.tolist() == [0, 1]


def test_no_constraint_is_one_block():
    blocks = Blocks.none(vocab_size=3, num_states=4)
    assert blocks.block_of_word.tolist() == [0, 0, 0]
    assert blocks.states_of_block.tolist() == [[0, 1, 2, 3]]
    assert blocks.partition


@settings(deadline=None)
@given(
    vocab_size=st.integers(1, 8),
    states_per_word=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_uniform_gives_every_word_different_states_and_every_state_a_word(vocab_size, states_per_word, seed, data):
    num_states = data.draw(st.integers(states_per_word, vocab_size * states_per_word))
    blocks = Blocks.uniform(vocab_size, num_states, states_per_word, seed)
    assert blocks.states_of_block.shape == (vocab_size, states_per_word)
    assert blocks.block_of_word.tolist() == list(range(vocab_size))
    for row in blocks.states_of_block.tolist():
        assert row == sorted(set(row))
    assert set(blocks.states_of_block.ravel().tolist()) == set(range(num_states))
    assert not blocks.partition
    assert blocks.num_real_states == blocks.num_states == num_states
    assert blocks.equals(Blocks.uniform(vocab_size, num_states, states_per_word, seed))


def test_uniform_draws_every_state_equally_often():
    uses = np.bincount(Blocks.uniform(4_000, 16, 4, seed=1).states_of_block.ravel(), minlength=16)
    expected = 4_000 * 4 / 16
    # chi-squared with 15 degrees of freedom: 37.7 is exceeded once in a thousand; the seed is fixed
    assert ((uses - expected) ** 2 / expected).sum() < 37.7


def test_another_seed_gives_another_uniform_constraint():
    assert not Blocks.uniform(50, 20, 4, seed=0).equals(Blocks.uniform(50, 20, 4, seed=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Blocks.partition_of([0, 1], 3, 1), "num_blocks=3 is more than the 2 words.*at most 2"),
        (lambda: Blocks.partition_of([0, 2, 2], 3, 1), "block 1 has no words.*fewer blocks"),
        (lambda: Blocks.partition_of([0, 2], 2, 1), "word 1 has block 2, expected 0 to 1"),
        (lambda: Blocks.partition_of([-1, 0], 2, 1), "word 0 has block -1"),
        (lambda: Blocks.partition_of([0, 1], 2, 0), "states_per_block=0"),
        (lambda: Blocks.partition_of(np.array([0.0, 1.0]), 2, 1), "integers"),
        (lambda: Blocks.partition_of([], 1, 1), "non-empty"),
        (lambda: Blocks.partition_of([0, 1], 2, 2, [1]), "num_alive has 1 entries.*2"),
        (lambda: Blocks.partition_of([0, 1], 2, 2, [1, 3]), r"num_alive\[1\]=3.*states_per_block=2"),
        (lambda: Blocks.partition_of([0, 1], 2, 2, [0, 2]), r"num_alive\[0\]=0"),
        (lambda: Blocks.uniform(5, 4, 5, 0), "states_per_word=5 is more than num_states=4"),
        (lambda: Blocks.uniform(2, 7, 3, 0), "cannot use num_states=7; ask for at most 6"),
        (lambda: Blocks.none(0, 4), "vocab_size=0"),
        (lambda: frequency_blocks(np.array([3, 1]), 3), "num_blocks=3 is more than the 2"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, message):
    with pytest.raises(VlhmmError, match=message) as refusal:
        make()
    assert "\n" not in str(refusal.value)


# ---- unequal shares of states


def test_shares_by_hand():
    # square roots 4 : 2 : 2 : 1 : 1 of 80 states: 32, 16, 16, 8, 8
    assert allocate_states([16, 4, 4, 1, 1], 80).tolist() == [32, 16, 16, 8, 8]


def test_shares_by_hand_when_the_bounds_cut():
    # 10 : 1 : 1 of 96 in eights, at most 48 and at least 16: the first is cut, the others share 48
    assert allocate_states([100, 1, 1], 96, maximum=48, minimum=16).tolist() == [48, 24, 24]
    # a block without tokens has the minimum; 3 : 1 of the rest in units of one
    assert allocate_states([9, 1, 0], 9, multiple_of=1, minimum=1).tolist() == [6, 2, 1]


def test_what_rounding_leaves_goes_to_the_lower_of_equal_blocks():
    assert allocate_states([5, 5, 5], 32).tolist() == [16, 8, 8]


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 10**6), min_size=1, max_size=12),
    multiple_of=st.sampled_from([1, 4, 8]),
    low=st.integers(1, 3),
    room=st.integers(0, 40),
    extra=st.integers(0, 10),
    power=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_shares_are_whole_bounded_monotone_and_sum_exactly(tokens, multiple_of, low, room, extra, power):
    num_blocks = len(tokens)
    units = low * num_blocks + room
    high = -(-units // num_blocks) + extra
    shares = allocate_states(
        tokens,
        units * multiple_of,
        multiple_of=multiple_of,
        minimum=low * multiple_of,
        maximum=high * multiple_of,
        power=power,
    )
    assert shares.sum() == units * multiple_of
    assert not (shares % multiple_of).any()
    assert shares.min() >= low * multiple_of
    assert shares.max() <= high * multiple_of
    by_tokens = shares[np.argsort(tokens, kind="stable")]
    # more tokens never mean fewer states; equal claims may differ by the one unit rounding leaves
    for few, many, a, b in zip(by_tokens, by_tokens[1:], sorted(tokens), sorted(tokens)[1:], strict=False):
        assert few <= many or ((a == b or not power) and few - many == multiple_of)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_states=100), "num_states=100 is not a multiple of 8.*96"),
        (dict(num_states=16), "too few for 3 blocks of at least 8; ask for at least 24"),
        (dict(num_states=96, maximum=24), "too many for 3 blocks of at most 24; ask for at most 72"),
        (dict(num_states=96, maximum=7), "too many for 3 blocks of at most 7"),
        (dict(num_states=96, power=-1.0), "power=-1.0"),
    ],
)
def test_shares_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        allocate_states([1, 2, 3], **arguments)


# ---- blocks.tsv


@settings(deadline=None)
@given(partition=partitions())
def test_a_partition_comes_back_from_its_file(partition, tmp_path_factory):
    blocks = Blocks.partition_of(*partition)
    words = [f"w{index}" for index in range(blocks.vocab_size)]
    path = tmp_path_factory.mktemp("blocks") / "blocks.tsv"
    blocks.write(path, words, counts=range(blocks.vocab_size))
    assert Blocks.read(path, words).equals(blocks)


def test_a_uniform_constraint_comes_back_from_its_file(tmp_path):
    blocks = Blocks.uniform(len(WORDS), 7, 3, seed=2)
    blocks.write(tmp_path / "blocks.tsv", WORDS)
    assert Blocks.read(tmp_path / "blocks.tsv", WORDS).equals(blocks)


def test_a_person_can_read_the_file(tmp_path):
    blocks = Blocks.partition_of([0, 1, 1, 0, 0], 2, 4, [4, 2])
    blocks.write(tmp_path / "blocks.tsv", WORDS, counts=[9, 2, 4, 1, 0])
    assert (tmp_path / "blocks.tsv").read_text(encoding="utf-8") == (
        "# vlhmm blocks 1\n# kind partition\n# num_states 8\n# states_per_group 4\n# num_alive 4,2\n"
        "the\t0\t9\n#\t1\t2\n<eos>\t1\t4\nünï\t0\t1\n<unk>\t0\t0\n"
    )
    assert os.listdir(tmp_path) == ["blocks.tsv"]


def test_equals_sees_every_difference():
    blocks = Blocks.partition_of([0, 1, 1], 2, 4, [4, 2])
    assert blocks.equals(Blocks.partition_of([0, 1, 1], 2, 4, [4, 2]))
    assert not blocks.equals(Blocks.partition_of([0, 0, 1], 2, 4, [4, 2]))
    assert not blocks.equals(Blocks.partition_of([0, 1, 1], 2, 4, [4, 3]))
    assert not blocks.equals(Blocks.partition_of([0, 1, 1], 2, 5, [4, 2]))


HEADER = "# vlhmm blocks 1\n# kind partition\n# num_states 4\n# states_per_group 2\n# num_alive 2,2\n"
UNIFORM = "# vlhmm blocks 1\n# kind uniform\n# num_states 3\n# states_per_group 2\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("a\t0\t1\nb\t1\t1\n", "no blocks file.*'# vlhmm blocks 1'"),
        (HEADER.replace("blocks 1", "blocks 9") + "a\t0\t1\nb\t1\t1\n", "no blocks file of format 1"),
        (HEADER + "a\t0\t1\n", "the word 'b' has no block"),
        (HEADER + "a\t0\t1\nb\t1\t1\nc\t1\t1\n", "line 8: the word 'c' is not in the vocabulary"),
        (HEADER + "a\t0\t1\na\t0\t1\n", "line 7: the word 'a' is there twice"),
        (HEADER + "a\t0\t1\nb\t1\n", "line 7: got 2 fields, expected word TAB block TAB count"),
        (HEADER + "a\t0\t1\nb\tx\t1\n", "line 7: got 'x', expected whole numbers"),
        (HEADER + "a\t0\t1\nb\t0,1\t1\n", "several blocks"),
        (HEADER + "a\t0\t1\nb\t0\t1\n", "block 1 has no words"),
        (HEADER + "a\t0\t1\nb\t2\t1\n", "word 1 has block 2"),
        (HEADER.replace("num_alive 2,2", "num_alive 2,3") + "a\t0\t1\nb\t1\t1\n", r"num_alive\[1\]=3"),
        (HEADER.replace("# num_alive 2,2\n", "") + "a\t0\t1\nb\t1\t1\n", "'# num_alive ...' is missing"),
        (
            HEADER.replace("states 4", "states 5") + "a\t0\t1\nb\t1\t1\n",
            "num_states=5 is not a multiple of 2",
        ),
        (HEADER.replace("states 4", "states many") + "a\t0\t1\nb\t1\t1\n", "header line num_states"),
        (HEADER.replace("partition", "other") + "a\t0\t1\nb\t1\t1\n", "kind is 'other'"),
        (UNIFORM + "a\t0,1\nb\t1,3\n", "word 1 has a state outside 0 to 2"),
        (UNIFORM + "a\t0,1\nb\t1,1\n", "word 1 has 1 different states, expected 2"),
        (UNIFORM + "a\t0,1\nb\t0,1\n", "state 2 has no words"),
        (HEADER.encode() + b"a\t0\t1\n\xff\t1\t1\n", "line 7: not UTF-8"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "blocks.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as refusal:
        Blocks.read(path, ["a", "b"])
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_vocabulary_of_another_size_is_refused(tmp_path):
    blocks = Blocks.partition_of([0, 1], 2, 1)
    with pytest.raises(ConfigError, match="blocks are of 2 words, got a vocabulary of 3"):
        blocks.write(tmp_path / "blocks.tsv", ["a", "b", "c"])
    with pytest.raises(ConfigError, match="counts of 1 words, expected 2"):
        blocks.write(tmp_path / "blocks.tsv", ["a", "b"], counts=[1])
    assert not os.listdir(tmp_path)


# ---- assignments


def test_frequency_blocks_by_hand():
    # 24 tokens in three blocks: 8 is the first; of the 16 left, 5 + 4 is nearer half than 5; then the rest
    assert frequency_blocks(np.array([1, 8, 5, 0, 4, 3, 3]), 3).tolist() == [2, 0, 1, 2, 1, 2, 2]


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=15),
    data=st.data(),
)
def test_frequency_blocks_are_runs_of_words_by_frequency(counts, data):
    num_blocks = data.draw(st.integers(1, len(counts)))
    blocks = frequency_blocks(np.array(counts), num_blocks)
    assert sorted(set(blocks.tolist())) == list(range(num_blocks))
    by_frequency = sorted(range(len(counts)), key=lambda word: (-counts[word], word))
    assert blocks[by_frequency].tolist() == sorted(blocks.tolist())
    # the first block takes one word, or ends as near its share as whole words (and blocks to come) allow
    share = Fraction(sum(counts), num_blocks)
    prefix = [sum(counts[word] for word in by_frequency[:n]) for n in range(len(counts) + 1)]
    size = int((blocks == 0).sum())
    best = min(abs(prefix[n] - share) for n in range(1, len(counts) - num_blocks + 2))
    assert num_blocks == 1 or abs(prefix[size] - share) == best


# ---- paths files


def test_a_paths_file_by_hand(tmp_path):
    path = tmp_path / "paths"
    path.write_text("00\tthe\t5\n00\ta\t2\n01\t#\t3\n1\tcat\t9\n1\tdog\t1\n")
    found = read_paths(path, ["cat", "#", "the", "a"])
    # tokens: cat 9 (dog is not in the vocabulary), the and a 7, # 3
    assert found.paths == ("1", "00", "01")
    assert found.block_of_word.tolist() == [0, 2, 1, 1]
    assert found.word_count.tolist() == [9, 3, 5, 2]
    assert found.num_blocks == 3


def test_a_paths_file_comes_back(tmp_path):
    block_of_word = np.array([0, 1, 2, 1, 0])
    counts = np.array([5, 3, 4, 1, 0])
    write_paths(tmp_path / "paths", WORDS, block_of_word, ("00", "1", "01"), counts)
    assert (tmp_path / "paths").read_text(encoding="utf-8") == (
        "00\tthe\t5\n00\t<unk>\t0\n01\t<eos>\t4\n1\t#\t3\n1\tünï\t1\n"
    )
    found = read_paths(tmp_path / "paths", WORDS)
    assert found.paths == ("00", "01", "1")  # of the two blocks with four tokens the smaller path comes first
    assert found.block_of_word.tolist() == [0, 2, 1, 2, 0]
    assert found.word_count.tolist() == counts.tolist()


def test_a_word_without_a_block_is_refused_by_name_or_gets_its_own(tmp_path):
    path = tmp_path / "paths"
    path.write_text("0\ta\t5\n1\tb\t2\n")
    with pytest.raises(DataError, match="the word '<eos>' has no block"):
        read_paths(path, ["a", "b", "<eos>"])
    found = read_paths(path, ["a", "b", "<eos>"], own_block=["<eos>"])
    assert found.block_of_word.tolist() == [0, 1, 2]
    assert len(set(found.paths)) == 3
    assert read_paths(path, ["a", "b"], own_block=["<eos>", "a"]).num_blocks == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0\ta\t1\n2\tb\t1\n", "line 2.*expected bit string TAB word TAB count"),
        ("0\ta\t1\n\tb\t1\n", "line 2"),
        ("0 a 1\n", "line 1"),
        ("0\ta\tmany\n", "line 1"),
        ("0\ta\t1\n1\ta\t1\n", "line 2: the word 'a' is there twice"),
        ("", "is empty"),
    ],
)
def test_a_wrong_paths_file_is_refused(tmp_path, content, message):
    (tmp_path / "paths").write_text(content)
    with pytest.raises(DataError, match=message):
        read_paths(tmp_path / "paths", ["a", "b"])


def test_wrong_paths_are_not_written(tmp_path):
    with pytest.raises(ConfigError, match="two blocks have the same path"):
        write_paths(tmp_path / "paths", ["a", "b"], np.array([0, 1]), ("0", "0"), np.array([1, 1]))
    with pytest.raises(ConfigError, match="got 1 words, blocks of 2"):
        write_paths(tmp_path / "paths", ["a"], np.array([0, 1]), ("0", "1"), np.array([1, 1]))
    assert not os.listdir(tmp_path)

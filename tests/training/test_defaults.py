"""Settings chosen by the size of a text: what is chosen, that it is valid for any text, and that what is named stays."""

import itertools
import json
import math

import pytest

import vlhmm
from vlhmm.cli.main import main
from vlhmm.data.corpora import Corpus
from vlhmm.data.text import encode, learn
from vlhmm.errors import ConfigError
from vlhmm.training.defaults import (
    bigram_perplexity,
    blocks_for,
    choose,
    configure,
    configure_for,
    embedding_dropout,
    state_dropout,
    warnings_for,
)
from vlhmm.training.run_folder import RunFolder


def values(tokens: int, words: int, **given):
    return {choice.name: choice.value for choice in choose(tokens, words, given)}


def texts_corpus(train: list[str], valid: list[str]) -> Corpus:
    vocabulary, text = learn(line.split() for line in train)
    return Corpus("toy", vocabulary, text, encode((line.split() for line in valid if line), vocabulary), None)


def test_more_text_more_states():
    chosen = [values(tokens, 20_000)["model.num_states"] for tokens in (500, 40_000, 300_000, 900_000, 10**8)]
    assert chosen == [2**6, 2**9, 2**12, 2**13, 2**14]


def test_every_choice_has_a_reason_and_fits():
    for tokens in (1, 3000, 40_000, 1_800_000, 200_000_000):
        for words in (3, 98, 40_000):
            config, choices = configure([], tokens, words)
            assert all(choice.reason for choice in choices)
            assert config.model.num_blocks <= max(1, words)
            assert config.model.num_states % config.model.num_blocks == 0
            assert config.training.unknown_words == "held-out" and config.model.embedding == "independent"


def test_what_is_named_stays_and_the_rest_follows():
    config, choices = configure(["model.num_states=2^10", "training.epochs=7", "training.seed=3"], 1_000_000, 10_000)
    assert (config.model.num_states, config.model.num_blocks, config.training.epochs) == (1024, 32, 7)
    assert config.training.seed == 3 and not {"model.num_states", "training.epochs"} & {c.name for c in choices}
    config, _ = configure(["model.num_states=1000"], 1_000_000, 10_000)
    assert config.model.num_states == 1000 and 1000 % config.model.num_blocks == 0
    config, _ = configure(["model.num_blocks=48"], 1_000_000, 10_000)
    assert config.model.num_blocks == 48 and config.model.num_states % 48 == 0
    config, _ = configure(["model.constraint=none", "model.num_blocks=1"], 30_000, 500)
    assert config.model.allocation == "equal"
    config, _ = configure(["distillation.weight=1"], 30_000_000, 500)
    assert config.training.unknown_words == "as-is" and config.training.em_tokens is None


def test_a_long_text_is_read_in_parts():
    chosen = values(200_000_000, 100_000)
    assert chosen["training.em_tokens"] == 1_000_000 and chosen["training.epochs"] == 1.0
    assert values(1_400_000, 100_000)["training.epochs"] == 100 and "training.em_tokens" not in values(1_400_000, 1000)
    assert values(400_000, 10_000)["training.epochs"] == 200


def test_a_prepared_text_is_read_in_parts_however_short():
    config, _ = configure([], 30_000, 5000, in_parts=True)
    assert config.training.em_tokens == 1_000_000 and config.training.unknown_words == "as-is"
    assert config.training.epochs == 200


@pytest.mark.parametrize("wrong", ["model.num_stats=4", "model.num_states=many", "model=3", "seed"])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ConfigError):
        configure([wrong], 1000, 100)


def test_numbers():
    assert blocks_for(2**13, 10**4) == 256 and blocks_for(2**13, 98) == 64 and blocks_for(2**6, 10**4) == 2
    assert [embedding_dropout(t) for t in (4, 28, 56, 112, 220, 5000)] == [0.35, 0.35, 0.25, 0.15, 0.05, 0.0]


def test_less_state_dropout_where_tokens_are_plenty_and_states_are_few():
    assert [state_dropout(t, s)[0] for t, s in ((96, 2**12), (96, 2**13), (96, 2**14), (28, 2**12))] == [0.25, 0.25, 0.5, 0.5]


def test_the_perplexity_of_a_bigram_model_is_that_of_its_definition():
    train, valid = ["a b a b c", "b a b", "c"], ["a b c", "d a a", ""]
    corpus = texts_corpus(train, valid)
    words = corpus.vocabulary.words
    text = [w for line in train for w in [*line.split(), words[corpus.vocabulary.eos]]]
    held_out = [w if w in words else "<unk>" for line in valid if line for w in [*line.split(), words[corpus.vocabulary.eos]]]
    pairs = list(itertools.pairwise(text))
    logs = []
    for before, word in itertools.pairwise(held_out):
        unigram = (text.count(word) + 1) / (len(text) + len(words))
        left = [pair for pair in pairs if pair[0] == before]
        if not left:
            logs.append(math.log(unigram))
            continue
        seen = max(0, left.count((before, word)) - 0.75) / len(left)
        logs.append(math.log(seen + 0.75 * len(set(left)) / len(left) * unigram))
    assert bigram_perplexity(corpus) == pytest.approx(math.exp(-sum(logs) / len(logs)))


def test_a_predictable_text_is_regularized_less():
    def chosen(perplexity):
        made = choose(400_000, 300, {}, bigram_perplexity=perplexity)
        return {choice.name: choice.value for choice in made}

    prose, events = chosen(60.0), chosen(2.2)
    assert prose["training.state_dropout"] == 0.25 and "training.weight_decay" not in prose
    assert prose == chosen(None)
    assert events["training.state_dropout"] == 0.1 and events["training.m_step_updates"] == 6
    lines = ["up down left right"] * 40
    configured = configure_for([], texts_corpus(lines * 200, lines))
    reasons = {choice.name: choice.reason for choice in configured.choices}
    assert "predictable" in reasons["training.state_dropout"] and configured.config.training.weight_decay == 0.5
    kept = configure_for(["training.weight_decay=3"], texts_corpus(lines * 200, lines))
    assert kept.config.training.weight_decay == 3


def test_a_warning_where_states_outnumber_the_text():
    assert not warnings_for(100_000, 8192)
    (warning,) = warnings_for(10_000, 8192)
    assert "8,192 states" in warning and "128 states" in warning


def test_train_says_what_it_chose_and_goes_on_as_it_began(tmp_path, capsys):
    lines = [f"the {noun} {verb} {place} ." for noun in "abcdefgh" for verb in "rst" for place in ("here", "there")]
    (tmp_path / "train.txt").write_text("\n".join(lines * 3) + "\n")
    (tmp_path / "valid.txt").write_text("\n".join(lines[::5]) + "\n")
    command = ["train", str(tmp_path / "train.txt"), "--valid", str(tmp_path / "valid.txt"), "--epochs", "2"]
    command += ["--out", str(tmp_path / "run")]
    assert main([*command, "--states", "2^8"]) == 0
    said = capsys.readouterr().err
    assert "model.num_blocks=8: 32 states per block" in said and "model.num_states" not in said
    assert "warning: 256 states outnumber what 864 training tokens support" in said
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["model"]["num_states"] == 256 and stored["model"]["embedding"] == "independent"
    assert main(command) == 0  # no --states: the run that is there
    model = vlhmm.train(lines * 3, valid=lines[::5], epochs=2, progress=False)
    assert model.distributions.num_states == 64


def test_a_model_with_uneven_blocks_can_be_loaded(tmp_path):
    often = ["the the the the dog the the the the cat ."] * 90
    rare = [f"w{i} x{i} y{i} ." for i in range(30)]
    settings = {"model.allocation": "tokens", "model.exchange_sweeps": 2}
    model = vlhmm.train(
        often + rare, valid=often[:3] + rare[:3], states=256, blocks=8, epochs=2, preset="tiny", settings=settings,
        out=tmp_path / "run", progress=False,
    )  # fmt: skip
    blocks = RunFolder(tmp_path / "run").load().blocks
    assert blocks.num_real_states == 256 < blocks.num_states
    assert model.score("the dog .") == vlhmm.load(tmp_path / "run").score("the dog .")

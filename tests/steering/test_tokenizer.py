"""Models over the ids of a Hugging Face tokenizer: text in, text out, every id can be emitted."""

import json
import math

import numpy as np
import pytest

import vlhmm
from vlhmm.cli.main import main
from vlhmm.data.tokenizer import TokenVocabulary, read_token_text
from vlhmm.errors import CheckpointError, ConfigError, DataError
from vlhmm.training.unseen_tokens import partner_of_token

pytest.importorskip("tokenizers")

from random_llm import LINES, make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, a text, and a run over its ids."""
    path = tmp_path_factory.mktemp("tokens")
    make_tokenizer(path / "tokenizer.json")
    (path / "train.txt").write_text("\n".join(LINES * 4) + "\n")
    records = [{"text": LINES[0]}, {"ids": [260, 261], "finished": False}, "The dog .", [258, 259, 1]]
    (path / "valid.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    code = main(
        ["train", str(path / "train.txt"), "--valid", str(path / "valid.jsonl"), "--tokenizer", str(path), "--preset", "tiny",
         "--out", str(path / "run"), "--epochs", "4", "--quiet"]
    )  # fmt: skip
    assert code == 0
    return path


def test_bytes_of_tokens_spell_every_text(folder):
    vocabulary = TokenVocabulary.read(folder / "tokenizer.json")
    for text in ("The big dog", " naïve café ☃\n\t", "\x00ÿ"):
        ids = vocabulary.ids(text)
        assert b"".join(vocabulary.token_bytes[i] for i in ids) == text.encode()
        assert vocabulary.text(ids) == text
    assert vocabulary.words[vocabulary.eos] == "<|im_end|>"
    assert vocabulary.token_bytes[vocabulary.eos] == b""


def test_json_lines_of_texts_and_ids(folder):
    vocabulary = TokenVocabulary.read(folder / "tokenizer.json")
    text = read_token_text(folder / "valid.jsonl", vocabulary)
    assert text.num_sentences == 4
    assert text.sentence(0).tolist() == [*vocabulary.ids(LINES[0]), vocabulary.eos]
    assert text.sentence(1).tolist() == [260, 261]  # cut: no end of text
    assert text.sentence(3).tolist() == [258, 259, vocabulary.eos]


def test_every_id_can_be_emitted_and_special_ones_stand_apart(folder):
    model = vlhmm.load(folder / "run")
    vocabulary = model.vocabulary
    assert len(vocabulary) == model.tokenizer.get_vocab_size()
    found = model.begin().step(vocabulary.ids("The")[0]).distribution().probabilities
    assert math.isclose(float(found.sum()), 1.0, rel_tol=1e-6)
    assert float(found.min()) > 0
    blocks = model.distributions.block_of_word.numpy()
    own = blocks[vocabulary.eos]
    assert set(np.flatnonzero(blocks == own).tolist()) == set(vocabulary.special)


def test_an_unseen_id_has_a_fixed_fraction_of_its_partner(folder):
    model = vlhmm.load(folder / "run")
    vocabulary = model.vocabulary
    tokens = read_token_text(folder / "train.txt", vocabulary).tokens
    counts = np.bincount(tokens, minlength=len(vocabulary))
    partner = partner_of_token(vocabulary, counts)
    ordinary = [i for i in np.flatnonzero(counts == 0).tolist() if i not in vocabulary.special]
    emission = model.distributions.emission
    scores = [float((emission[i] / emission[partner[i]]).log().mean()) for i in ordinary]
    once = int((counts == counts[counts > 0].min()).sum())
    factor = json.loads((folder / "run" / "calibration.json").read_text())["emission"]
    assert np.allclose(scores, factor * math.log(min(1, once / len(ordinary))), atol=1e-4)


def test_queries_take_and_give_text(folder, capsys):
    model = vlhmm.load(folder / "run")
    ids = [*model.vocabulary.ids(LINES[0]), model.vocabulary.eos]
    state = model.begin()
    for i in ids:
        state = state.step(i)
    (folder / "line.txt").write_text(LINES[0] + "\n")
    assert main(["score", str(folder / "run"), str(folder / "line.txt"), "--format", "jsonl", "--quiet"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert scored["tokens"] == len(ids) and scored["oov"] == 0
    assert math.isclose(scored["log_prob"], state.log_prob, abs_tol=1e-3)
    report = model.perplexity(folder / "line.txt")
    assert math.isclose(report.log_likelihood, state.log_prob, abs_tol=1e-3) and report.tokens == len(ids)
    assert main(["sample", str(folder / "run"), "--prompt", "The big", "-n", "2", "--quiet", "--max-tokens", "5"]) == 0
    assert all(line.startswith("The big") for line in capsys.readouterr().out.splitlines()[:1])
    assert main(["infill", str(folder / "run"), "The [MASK] dog", "--mode", "best", "--format", "json", "--quiet"]) == 0
    filled = json.loads(capsys.readouterr().out)
    assert filled["text"] == "The" + filled["gaps"][0] + " dog"
    for verb in (["next", str(folder / "run"), "The big"], ["decode", str(folder / "run"), str(folder / "line.txt")]):
        assert main([*verb, "--quiet", "--format", "jsonl"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[0])


def test_another_tokenizer_in_the_run_folder_is_refused(folder, tmp_path):
    import shutil

    shutil.copytree(folder / "run", tmp_path / "run")
    path = tmp_path / "run" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(CheckpointError, match="checksum"):
        vlhmm.load(tmp_path / "run")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        vlhmm.load(tmp_path / "run")


def test_bad_input_has_one_line(folder, tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        TokenVocabulary.read(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="tokenizers can read"):
        TokenVocabulary.read(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="--end-of-text"):
        TokenVocabulary.read(folder, end="</nothing>")
    (tmp_path / "ids.jsonl").write_text("[1000000]\n")
    with pytest.raises(DataError, match="the tokenizer that the ids were made with"):
        read_token_text(tmp_path / "ids.jsonl", TokenVocabulary.read(folder))


@pytest.mark.slow
def test_150_000_ids(tmp_path):
    """Most ids never occur; each can be emitted even so."""
    import tokenizers

    size = 150_000
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"</s>": 0} | {f"w{i}": i for i in range(1, size)}, unk_token="w1")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = 1 + np.random.default_rng(0).zipf(1.3, size=(1000, 20)) % (size - 1)
    for name, rows in (("train", ids[:900]), ("valid", ids[900:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row.tolist()) + "\n" for row in rows))
    code = main(
        ["train", str(tmp_path / "train.jsonl"), "--valid", str(tmp_path / "valid.jsonl"), "--tokenizer", str(tmp_path),
         "--preset", "tiny", "--epochs", "2", "--out", str(tmp_path / "run"), "--quiet"]
    )  # fmt: skip
    assert code == 0
    model = vlhmm.load(tmp_path / "run")
    found = model.begin().step(5).distribution().probabilities
    assert len(found) == size and float(found.min()) > 0
    assert math.isclose(float(found.sum()), 1.0, rel_tol=1e-5)

"""Checkpoints of Ctrl-G and TRACE in and out, and trained models: one runtime for all, one answer."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("outlines_core")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import vlhmm
from steering.random_llm import LINES, save_llm
from vlhmm.cli.main import main
from vlhmm.errors import ConfigError, DataError, QueryError
from vlhmm.steering import text_constraint as tc
from vlhmm.steering.checkpoints import is_checkpoint, read_checkpoint, write_checkpoint
from vlhmm.steering.generation import generate, guide_for, steering_hmm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small language model, and an HMM over its tokens."""
    path = tmp_path_factory.mktemp("checkpoints")
    save_llm(path / "llm")
    (path / "train.txt").write_text("\n".join(LINES * 4) + "\n")
    code = main(
        ["train", str(path / "train.txt"), "--valid", str(path / "train.txt"), "--tokenizer", str(path / "llm"), "--preset",
         "tiny", "--out", str(path / "run"), "--epochs", "2", "--quiet"]
    )  # fmt: skip
    assert code == 0
    return path


@pytest.fixture(scope="module")
def parts(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    llm = AutoModelForCausalLM.from_pretrained(folder / "llm").eval()
    return llm, AutoTokenizer.from_pretrained(folder / "llm"), vlhmm.load(folder / "run", dtype=torch.float64)


def segmentations(text, pieces):
    if not text:
        yield ()
    for token, piece in enumerate(pieces):
        if piece and text.startswith(piece):
            yield from ((token, *rest) for rest in segmentations(text[len(piece) :], pieces))


def test_a_trained_model_gives_the_probability_of_every_segmentation(parts):
    _, tokenizer, model = parts
    guide = guide_for(model, tokenizer, tc.choice("The big", "us"), 6, [model.vocabulary.eos])
    expected = 0.0
    for text in (b"The big", b"us"):
        for tokens in segmentations(text, model.vocabulary.token_bytes):
            if len(tokens) <= 5:
                expected += np.exp(model.score([model.vocabulary.words[token] for token in tokens]))
    assert expected > 0
    assert float(guide.log_ratios(guide.start([()]))[1][0]) == pytest.approx(np.log(expected), abs=1e-6)


@pytest.mark.parametrize("dialect", ["ctrl-g", "trace"])
def test_a_model_written_and_read_again_steers_alike(parts, dialect, tmp_path):
    llm, tokenizer, model = parts
    constraint = tc.must_include("dog") & tc.words(2, 4)
    dense = read_checkpoint(write_checkpoint(model, tmp_path / "hmm", dialect))
    assert is_checkpoint(tmp_path / "hmm") and dense.num_blocks == 1
    assert [path.name for path in tmp_path.glob("hmm/*") if path.is_dir()] == []
    eos = [model.vocabulary.eos]
    left, right = (guide_for(each, tokenizer, constraint, 8, eos) for each in (model, dense))
    a, b = left.start([()]), right.start([()])
    for token in tokenizer.encode("The dog"):
        logs_a, p_a = left.log_ratios(a)
        logs_b, p_b = right.log_ratios(b)
        torch.testing.assert_close(p_a, p_b, rtol=1e-4, atol=1e-4)
        usable = torch.isfinite(logs_a) & torch.isfinite(logs_b)
        torch.testing.assert_close(logs_a[usable].float(), logs_b[usable], rtol=1e-3, atol=1e-3)
        a, b = left.step(a, [token]), right.step(b, [token])
    texts = generate(llm, tokenizer, dense, "The", constraint, n=4, max_new_tokens=8)
    assert all(text.satisfied for text in texts)


def test_both_dialects_have_their_own_names(parts, tmp_path):
    model = parts[2]
    write_checkpoint(model, tmp_path / "g", "ctrl-g")
    write_checkpoint(model, tmp_path / "t", "trace")
    ctrl_g, trace = (load_file(tmp_path / name / "model.safetensors") for name in ("g", "t"))
    assert set(ctrl_g) == {"alpha_exp", "beta", "gamma"} and set(trace) == {"alpha_exp", "beta", "gamma_exp"}
    torch.testing.assert_close(ctrl_g["gamma"].exp(), trace["gamma_exp"][0])
    states = len(ctrl_g["gamma"])
    assert json.loads((tmp_path / "t/config.json").read_text())["hidden_size"] == states
    assert json.loads((tmp_path / "g/config.json").read_text())["hidden_states"] == states
    assert trace["alpha_exp"][-1, -1] == 1 and float(trace["beta"][-1, model.vocabulary.eos]) == pytest.approx(0, abs=1e-6)
    again = write_checkpoint(read_checkpoint(tmp_path / "t"), tmp_path / "g2", "ctrl-g", eos=model.vocabulary.eos)
    torch.testing.assert_close(load_file(again / "model.safetensors")["beta"].exp(), ctrl_g["beta"].exp())


def test_refusals(parts, tmp_path, folder):
    model = parts[2]
    with pytest.raises(DataError, match="no such folder"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(DataError, match="hidden_states and vocab_size"):
        read_checkpoint(folder)
    path = write_checkpoint(model, tmp_path / "hmm", "ctrl-g")
    arrays = load_file(path / "model.safetensors")
    for changed, said in (
        ({"alpha_exp": arrays["alpha_exp"][:-1]}, "by config.json"),
        ({"alpha_exp": arrays["alpha_exp"] * 0.5}, "does not sum to one"),
        ({"gamma": None}, "neither gamma nor gamma_exp"),
    ):
        save_file({k: v for k, v in (arrays | changed).items() if v is not None}, path / "model.safetensors")
        with pytest.raises(DataError, match=said) as refused:
            read_checkpoint(path)
        assert "\n" not in str(refused.value)
    (path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(DataError, match="cannot read"):
        read_checkpoint(path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(DataError, match="is a pickle"):
        read_checkpoint(path)
    with pytest.raises(QueryError, match="ctrl-g or trace"):
        write_checkpoint(model, tmp_path / "x", "other")
    with pytest.raises(QueryError, match="give eos"):
        write_checkpoint(steering_hmm(model), tmp_path / "x", "trace")
    with pytest.raises(QueryError, match="expected a dense HMM"):
        write_checkpoint(steering_hmm(model), tmp_path / "x", "trace", eos=1)


def test_models_over_words_and_other_tokenizers_are_refused(parts, tmp_path, folder):
    _, tokenizer, model = parts
    main(
        ["train", str(folder / "train.txt"), "--valid", str(folder / "train.txt"), "--preset", "tiny", "--out",
         str(tmp_path / "words"), "--epochs", "1", "--quiet"]
    )  # fmt: skip
    with pytest.raises(ConfigError, match="over .* words, steering needs one over the language model's tokens"):
        steering_hmm(vlhmm.load(tmp_path / "words"))
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_file=str(folder / "llm/tokenizer.json"), eos_token="<|im_end|>")
    vocabulary = other.get_vocab()
    a, b = sorted(token for piece, token in vocabulary.items() if len(piece) == 1)[:2]
    swapped = {piece: {a: b, b: a}.get(token, token) for piece, token in vocabulary.items()}
    other.get_vocab = lambda: swapped
    with pytest.raises(ConfigError, match="do not match|changes the text"):
        guide_for(model, other, tc.words(1, 2), 8)

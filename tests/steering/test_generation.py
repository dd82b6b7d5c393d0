"""`vlhmm.steering.generate`: exact conditioning, weights, particles, caches of real models, and refusals."""

from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("outlines_core")
pytest.importorskip("transformers")

from steering.hmm_llm import ToyLLM, ToyTokenizer
from steering.random_llm import save_llm
from steering.steering_models import PIECES, random_hmm, steering_hmm, text_probabilities
from steering.test_logits_processor import agree, conditional
from steering.test_lookahead import CASES
from vlhmm.errors import ConfigError, VlhmmError
from vlhmm.steering import text_constraint as tc
from vlhmm.steering.generation import generate, guide_for
from vlhmm.steering.hmm import SteeringHMM

BUDGET = 5


def toy(name, seed=7, hmm_seed=None, **how):
    """Texts of the LLM that is an HMM, led by the same HMM or by another one."""
    model = random_hmm(2, 3, seed=seed)
    hmm = steering_hmm(model if hmm_seed is None else random_hmm(2, 3, seed=hmm_seed))
    make, truth = CASES[name]
    options = {"max_new_tokens": BUDGET, "read_prompt": True, "batch": 512} | how
    prompt = options.pop("prompt", " ")
    return model, truth, generate(ToyLLM(model), toy_tokenizer(hmm), hmm, prompt, make(), **options)


def toy_tokenizer(hmm):
    """A tokenizer that cannot encode the sentence by which tokenizers are checked; its pieces are known."""
    tokenizer = ToyTokenizer()
    hmm.pieces_of[tokenizer] = PIECES
    return tokenizer


@pytest.mark.parametrize("name", CASES)
def test_samples_are_exact_and_their_weights_are_the_probability_of_the_constraint(name):
    model, truth, texts = toy(name, n=400, prompt=[" ", "ab"])
    for prompt, ids in ((" ", (2,)), ("ab", (0, 1))):
        mine = [text for text in texts if text.prompt == prompt]
        assert len(mine) == 400 and all(text.satisfied for text in mine)
        assert agree(Counter(text.token_ids for text in mine), conditional(model, truth, ids)) > 1e-4
        width = len(prompt)
        exact = text_probabilities(model, lambda text, width=width: truth(text[width:]), BUDGET, ids)
        for text in mine[:20]:
            assert np.exp(text.log_weight) == pytest.approx(sum(exact.values()), rel=1e-4)
            assert np.exp(text.log_prob) == pytest.approx(exact[text.token_ids], rel=1e-4)
            assert text.nats_per_token == pytest.approx(-text.log_prob / len(text.token_ids))


@pytest.mark.parametrize(("weight", "particles"), [(1.0, 1), (0.0, 1), (0.5, 4), (1.0, 8), (2.0, 4)])
def test_weights_correct_a_wrong_hmm(weight, particles):
    """With an HMM that is not the LLM, weighted samples still stand for the LLM given the constraint."""
    n = 1500 if particles == 1 else 500
    model, truth, texts = toy("must_include", hmm_seed=11, n=n, weight=weight, particles=particles, seed=3, batch=4096)
    exact = text_probabilities(model, lambda text: truth(text[1:]), BUDGET, (2,))
    total = sum(exact.values())
    weights = np.exp([text.log_weight for text in texts])
    groups = {(tokens[0], len(tokens)) for tokens in exact}
    for group in groups:  # sum_x p_LLM(x) [x in C and in the group] has an unbiased estimate
        inside = np.array([(text.token_ids[0], len(text.token_ids)) == group for text in texts])
        expected = sum(p for tokens, p in exact.items() if (tokens[0], len(tokens)) == group)
        error = (weights * inside).std() / np.sqrt(n)
        assert (weights * inside).mean() == pytest.approx(expected, abs=4.5 * error + 1e-4 * total)
    assert weights.mean() == pytest.approx(total, abs=4.5 * weights.std() / np.sqrt(n))
    assert all(text.satisfied for text in texts)


def test_more_particles_come_nearer_to_the_truth():
    distance = {}
    for particles in (1, 8):
        model, truth, texts = toy("must_include", hmm_seed=11, n=1000, particles=particles, seed=5, batch=16384)
        distance[particles] = 0.0
        for token in range(5):
            expected = sum(p for tokens, p in conditional(model, truth, (2,)).items() if tokens[0] == token)
            distance[particles] += abs(np.mean([text.token_ids[0] == token for text in texts]) - expected) / 2
    assert distance[8] < 0.6 * distance[1]


def test_greedy_and_beams():
    model, truth, texts = toy("words", mode="greedy")
    assert texts[0].satisfied and texts[0].log_weight is None
    model, truth, texts = toy("words", mode="beam", num_beams=64, n=3)
    expected = conditional(model, truth, (2,))
    assert [text.token_ids for text in texts] == sorted(expected, key=expected.get, reverse=True)[:3]


def test_temperature_is_of_the_language_model():
    model, truth, texts = toy("words", n=800, temperature=0.5, hmm_seed=7)
    exact = text_probabilities(model, lambda text: truth(text[1:]), BUDGET, (2,))
    assert np.exp(texts[0].log_prob) == pytest.approx(exact[texts[0].token_ids], rel=1e-4)
    hot = toy("words", n=800, temperature=2.0, hmm_seed=7)[2]
    assert np.mean([text.log_prob for text in texts]) > np.mean([text.log_prob for text in hot])


# ---- a transformer with a cache, more logits than tokens and two end tokens


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = save_llm(tmp_path_factory.mktemp("llm"))
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def hmm_of(vocab_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    start = torch.softmax(torch.randn(12, generator=generator), 0)
    transition = torch.softmax(torch.randn(12, 12, generator=generator), 1)
    return SteeringHMM.dense(start, transition, torch.softmax(torch.randn(12, vocab_size, generator=generator), 1))


def plain_log_prob(llm, head, ids):
    with torch.inference_mode():
        logits = llm(input_ids=torch.tensor([[*head, *ids]])).logits[0, len(head) - 1 : -1]
    return float(torch.log_softmax(logits.float(), 1).gather(1, torch.tensor(ids)[:, None]).sum())


@pytest.mark.parametrize("how", [{"n": 6}, {"n": 3, "particles": 4}, {"mode": "greedy"}, {"mode": "beam", "n": 2, "num_beams": 4}])
def test_a_transformer_with_its_cache(llama, how):
    llm, tokenizer = llama
    constraint = tc.must_include("dog", "park") & tc.words(2, 6)
    texts = generate(llm, tokenizer, hmm_of(len(tokenizer)), ["The", "The big dog saw us in"], constraint, max_new_tokens=14, **how)
    assert len(texts) == 2 * how.get("n", 1)
    for text in texts:
        assert text.satisfied and constraint.accepts(text.text)
        assert text.token_ids[-1] in (0, 1) and max(text.token_ids) < len(tokenizer)
        assert tokenizer.decode(text.token_ids, skip_special_tokens=True) == text.text
        head = tokenizer.encode(text.prompt)
        assert text.log_prob == pytest.approx(plain_log_prob(llm, head, text.token_ids), rel=1e-4)
    again = generate(llm, tokenizer, hmm_of(len(tokenizer)), ["The", "The big dog saw us in"], constraint, max_new_tokens=14, **how)
    assert [text.token_ids for text in again] == [text.token_ids for text in texts]


def test_tables_and_automata_are_kept_with_the_model(llama):
    llm, tokenizer = llama
    hmm = hmm_of(len(tokenizer))
    first = guide_for(hmm, tokenizer, tc.must_include("dog"), 9, [0, 1])
    second = guide_for(hmm, tokenizer, tc.must_include("dog"), 8, [0, 1])
    assert first.table is second.table and len(hmm.automata) == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"n": 0}, "n=0"),
        ({"mode": "fast"}, "sample, greedy or beam"),
        ({"weight": -1.0}, "weight=-1"),
        ({"weight": 1e308}, "weight=1e"),
        ({"temperature": 0.0}, "temperature=0"),
        ({"temperature": 1e-300}, "temperature=1e-300"),
        ({"particles": 10**8}, "100,000,000 sequences at once take"),
        ({"mode": "beam", "num_beams": 10**8}, "100,000,000 sequences at once take"),
        ({"mode": "greedy", "particles": 2}, "need mode sample"),
        ({"mode": "beam", "n": 9}, "raise num_beams"),
        ({"max_new_tokens": 2}, "at least 3 tokens with the end token, max_new_tokens is 2"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 10**9}, "max_new_tokens=1000000000"),
    ],
)
def test_refusals_before_anything_is_generated(how, said):
    model = random_hmm(2, 3)
    llm, hmm = ToyLLM(model), steering_hmm(model)
    with pytest.raises(VlhmmError, match=said) as refused:
        generate(llm, toy_tokenizer(hmm), hmm, "a", tc.choice("aa"), **how)
    assert "\n" not in str(refused.value) and llm.calls == 0


def test_another_tokenizer_is_refused(llama):
    llm, tokenizer = llama
    with pytest.raises(ConfigError, match="do not match"):
        generate(llm, tokenizer, hmm_of(40), "a", tc.words(1, 2))

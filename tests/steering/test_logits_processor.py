"""Steered generation by `transformers` on a language model that is an HMM, against the exact conditional distribution."""

from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("outlines_core")
pytest.importorskip("transformers")

from transformers import LogitsProcessorList

from steering.hmm_llm import PAD, ToyLLM
from steering.steering_models import EOS, PIECES, random_hmm, text_probabilities
from steering.test_guide import guide_of
from steering.test_lookahead import CASES
from vlhmm.errors import ConfigError
from vlhmm.steering.logits_processor import HMMLogitsProcessor

BUDGET = 5


def conditional(model, truth, prefix=()):
    """{generated tokens: p(tokens | prefix, C)}; the constraint is on the generated text."""
    skipped = len(b"".join(PIECES[token] for token in prefix))
    found = text_probabilities(model, lambda text: truth(text[skipped:]), BUDGET, prefix)
    total = sum(found.values())
    return {tokens: p / total for tokens, p in found.items()}


def run(llm, processor, prompts, **how):
    """Generated tokens of each sequence, without padding."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    out = llm.generate(
        ids, attention_mask=(ids != PAD).long(), logits_processor=LogitsProcessorList([processor]),
        max_new_tokens=processor.guide.max_new_tokens, use_cache=False, **how,
    )  # fmt: skip
    return [tuple(token for token in row[width:].tolist() if token != PAD) for row in out]


def agree(counts, expected):
    """p-value of the counts; cells of fewer than five expected are one."""
    total = sum(counts.values())
    assert set(counts) <= set(expected), set(counts) - set(expected)
    common = [tokens for tokens in expected if expected[tokens] * total >= 5]
    seen = [counts[tokens] for tokens in common]
    wanted = [expected[tokens] * total for tokens in common]
    if total - sum(wanted) > 1:
        seen, wanted = [*seen, total - sum(seen)], [*wanted, total - sum(wanted)]
    wanted = np.array(wanted) * (sum(seen) / sum(wanted))
    statistic, freedom = ((np.array(seen) - wanted) ** 2 / wanted).sum(), len(seen) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2))) if freedom else 1.0


@pytest.mark.parametrize("name", CASES)
def test_sampling_is_exact_conditioning(name):
    model = random_hmm(2, 3, seed=7)
    processor = HMMLogitsProcessor(guide_of(name, model), read_prompt=True, pad_token_id=PAD)
    torch.manual_seed(1)
    prompts = [(2,), (0, 1, 4)]  # of different lengths, in one batch
    found = run(ToyLLM(model), processor, prompts * 400, do_sample=True, top_k=0)
    for i, prompt in enumerate(prompts):
        expected = conditional(model, CASES[name][1], prompt)
        assert agree(Counter(found[i::2]), expected) > 1e-4


def test_a_wrong_model_is_seen():
    """The test above can fail: another HMM leads to another distribution."""
    model = random_hmm(2, 3, seed=7)
    processor = HMMLogitsProcessor(guide_of("must_include", random_hmm(2, 3, seed=8)), read_prompt=True)
    torch.manual_seed(1)
    found = run(ToyLLM(model), processor, [(2,)] * 800, do_sample=True, top_k=0)
    assert agree(Counter(found), conditional(model, CASES["must_include"][1], (2,))) < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_beam_search_finds_the_most_probable_texts(name):
    model = random_hmm(2, 3, seed=9)
    processor = HMMLogitsProcessor(guide_of(name, model), read_prompt=True, pad_token_id=PAD)
    prompts = [(2,), (1, 0, 4)]
    llm = ToyLLM(model)
    beams = 64  # more than there are prefixes worth keeping: the search is exhaustive
    found = run(llm, processor, prompts, num_beams=beams, do_sample=False, length_penalty=0.0, num_return_sequences=3)
    for i, prompt in enumerate(prompts):
        expected = conditional(model, CASES[name][1], prompt)
        best = sorted(expected, key=expected.get, reverse=True)[:3]
        assert found[3 * i : 3 * i + len(best)] == best


def test_scores_of_beams_are_conditional_probabilities():
    model = random_hmm(2, 3, seed=9)
    processor = HMMLogitsProcessor(guide_of("words", model), read_prompt=True)
    out = ToyLLM(model).generate(
        torch.tensor([[2, 0]]), logits_processor=LogitsProcessorList([processor]), max_new_tokens=BUDGET, num_beams=8,
        do_sample=False, length_penalty=0.0, use_cache=False, return_dict_in_generate=True, output_scores=True,
        num_return_sequences=4,
    )  # fmt: skip
    expected = conditional(model, CASES["words"][1], (2, 0))
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = tuple(token for token in row[2:] if token != PAD)
        assert np.exp(score) == pytest.approx(expected[tokens], rel=1e-4)


def test_greedy_and_one_processor_for_several_calls():
    model = random_hmm(2, 3, seed=4)
    llm, processor = ToyLLM(model), HMMLogitsProcessor(guide_of("words", model), read_prompt=True, pad_token_id=PAD)
    alone = [run(llm, HMMLogitsProcessor(processor.guide, read_prompt=True), [p], do_sample=False)[0] for p in [(2,), (0, 1)]]
    assert run(llm, processor, [(2,), (0, 1)], do_sample=False) == alone
    assert run(llm, processor, [(2,)], do_sample=False) == alone[:1]
    assert run(llm, processor, [(0, 1)], do_sample=False) == alone[1:]


@pytest.mark.parametrize("weight", [0.0, 0.3, 2.5])
def test_weights_scale_the_ratio_and_keep_the_constraint(weight):
    model, other = random_hmm(2, 3, seed=4), random_hmm(2, 3, seed=5)
    guide = guide_of("must_include", other)
    ids = torch.tensor([[2], [2]])
    scores = torch.randn(2, len(PIECES) + 1, generator=torch.Generator().manual_seed(0)).double()
    ratios, _ = guide.log_ratios(guide.start([(), ()]))
    steered = HMMLogitsProcessor(guide, weight=weight)(ids, scores)
    finite = torch.isfinite(ratios)
    torch.testing.assert_close(steered[:, :-1][finite], (scores[:, :-1] + weight * ratios)[finite])
    assert (steered[:, :-1][~finite] == -torch.inf).all() and (steered[:, -1] == -torch.inf).all()
    torch.manual_seed(0)
    found = run(ToyLLM(model), HMMLogitsProcessor(guide, weight=weight), [(2,)] * 50, do_sample=True, top_k=0)
    truth = CASES["must_include"][1]
    for tokens in found:
        assert tokens[-1] in EOS and truth(b"".join(PIECES[token] for token in tokens[:-1]).decode())
    with pytest.raises(ConfigError, match="weight"):
        HMMLogitsProcessor(guide, weight=-1)


def test_logits_narrower_than_the_vocabulary():
    guide = guide_of("words", random_hmm())
    assert HMMLogitsProcessor(guide)(torch.tensor([[0]]), torch.zeros(1, 6)).shape == (1, 6)

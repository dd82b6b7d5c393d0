"""Calibration: factors on logits, folded into the last layers, chosen on valid, kept beside the model."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import vlhmm
from models import KINDS, small_hmm
from toy import GRADIENT, tiny, toy_lines
from vlhmm.data.manifest import remove_listed
from vlhmm.data.text import encode, lines, shards
from vlhmm.distributions import HMMDistributions
from vlhmm.errors import CheckpointError, ConfigError
from vlhmm.evaluation.perplexity import evaluate
from vlhmm.training import calibration as calibration_module
from vlhmm.training.calibration import MOST, Factors, last_layers, scaled, search
from vlhmm.training.trainer import train

FACTORS = Factors(emission=0.8, transition=0.7, within=1.3)


def tempered(probability: torch.Tensor, factor: float) -> torch.Tensor:
    """p^factor, normalized over the last axis; zeros stay zero."""
    raised = torch.where(probability > 0, probability.clamp(min=1e-300) ** factor, 0.0)
    return raised / raised.sum(-1, keepdim=True)


def expected_transition(dense: torch.Tensor, kind: str, blocks, factors: Factors) -> torch.Tensor:
    """The whole matrix by the definition: blocks and states within them tempered each by its own factor."""
    if KINDS[kind].get("transition") != "block-factored":
        return tempered(dense, factors.transition)
    factor_within = 1.0 if "within" in KINDS[kind] else factors.within  # low rank: not tempered
    by_block = dense.view(len(dense), blocks.num_blocks, -1)
    into_block = by_block.sum(-1, keepdim=True)
    within = by_block / into_block
    block = tempered(into_block[..., 0], factors.transition)[..., None]
    return (block * tempered(within, factor_within)).view_as(dense)


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_weights_are_tempered_distributions(kind):
    hmm, blocks = small_hmm(kind)
    before_a, before_o = HMMDistributions(hmm(), blocks).dense()
    weights = {name: p.detach() for name, p in hmm.named_parameters()}
    after = torch.func.functional_call(hmm, scaled(weights, hmm.config, FACTORS), ())
    a, o = HMMDistributions(after, blocks).dense()
    alive = before_o.sum(1) > 0  # padding of uneven blocks emits nothing and is never entered
    assert_close(a[alive], expected_transition(before_a, kind, blocks, FACTORS)[alive], rtol=1e-9, atol=1e-12)
    assert_close(o[alive], tempered(before_o, FACTORS.emission)[alive], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_factors_of_one_change_nothing(kind):
    hmm, _ = small_hmm(kind)
    weights = {name: p.detach() for name, p in hmm.named_parameters()}
    for name, tensor in scaled(weights, hmm.config, Factors()).items():
        assert torch.equal(tensor, weights[name])
    assert {n for names in last_layers(hmm.config).values() for n in names} <= weights.keys()


def test_search_finds_the_least_of_a_bowl():
    asked = []

    def bowl(f: Factors) -> float:
        asked.append(f)
        return 5 + (f.emission - 0.9) ** 2 + (f.transition - 0.75) ** 2 + (f.within - 1.2) ** 2

    best, value = search(bowl, ("emission", "transition", "within"))
    assert best == Factors(0.9, 0.75, 1.2) and value == bowl(best)
    assert asked[0] == Factors()  # never worse than the model as it was trained
    assert search(lambda f: 1.0, ("emission",)) == (Factors(), 1.0)


def test_search_ends_where_there_is_no_least():
    best, _ = search(lambda f: 100 + 1 / f.within - f.emission, ("emission", "within"))
    assert best == Factors(emission=MOST, within=MOST)
    assert search(lambda f: 100 - f.emission * 1e-6, ("emission",))[0] == Factors()  # rounding is no gain


def test_calibration_can_be_stopped_and_begins_anew(toy, tmp_path):
    config, asked = tiny("training.calibrate=true", "training.epochs=2"), []
    stopped = train(toy, config, tmp_path, should_stop=lambda: (asked.append(1), len(asked) > 5)[1])
    assert stopped.step == stopped.total_steps and stopped.stopped_by == "interrupt" and not stopped.finished
    assert not (tmp_path / "calibration.json").exists()
    again = train(toy, config, tmp_path)
    assert again.finished and again.calibrated
    assert evaluate(vlhmm.load(tmp_path), toy.valid, "reset").perplexity == pytest.approx(again.best_valid, rel=1e-5)


def test_a_run_that_begins_anew_forgets_its_calibration(toy, tmp_path):
    train(toy, tiny("training.calibrate=true"), tmp_path)
    shutil.rmtree(tmp_path / "checkpoint")
    plain = train(toy, tiny("training.calibrate=false"), tmp_path)
    assert evaluate(vlhmm.load(tmp_path), toy.valid, "reset").perplexity == pytest.approx(plain.best_valid, rel=1e-5)


@pytest.mark.parametrize("changes", [[], [*GRADIENT, "model.transition=softmax", "model.source_block_init=0"]])
def test_a_calibrated_run_is_better_on_valid_and_loads_so(toy, tmp_path, monkeypatch, changes):
    plain = train(toy, tiny(*changes, "training.calibrate=false"), tmp_path / "plain")
    calibrated = train(toy, tiny(*changes, "training.calibrate=true"), tmp_path / "run")
    assert calibrated.best_valid < plain.best_valid  # 400 sentences: too sure of itself, whatever the model
    loaded = evaluate(vlhmm.load(tmp_path / "run"), toy.valid, "reset").perplexity
    assert loaded == pytest.approx(calibrated.best_valid, rel=1e-5)
    monkeypatch.setattr(calibration_module, "search", lambda *_: pytest.fail("calibrated twice"))
    again = train(toy, tiny(*changes, "training.calibrate=true"), tmp_path / "run")
    assert again.best_valid == calibrated.best_valid  # not calibrated twice
    remove_listed(tmp_path / "run", "calibration.json")
    raw = evaluate(vlhmm.load(tmp_path / "run"), toy.valid, "reset").perplexity
    assert raw == pytest.approx(plain.best_valid, rel=1e-5)  # the weights are as they were trained


def test_a_damaged_calibration_gets_one_clear_line(toy, tmp_path):
    train(toy, tiny("training.calibrate=true", "training.epochs=2"), tmp_path / "run")
    (tmp_path / "run" / "calibration.json").write_text(json.dumps({"emision": 1}))
    with pytest.raises(CheckpointError, match="calibration.json is damaged"):
        vlhmm.load(tmp_path / "run")


def test_extra_text_is_read_share_by_share(toy, tmp_path):
    from vlhmm.training.plan import make_plan

    extra = encode([["the", "big", "cat", "there", "runs", "."]] * 300, toy.vocabulary)
    settings = replace(tiny().training, extra_tokens=700)
    plan = make_plan(toy.train, settings, toy.vocabulary.eos, extra)
    sizes = []
    for epoch in range(6):
        ((*batches,),) = plan(epoch)
        sizes.append(sum(int(batch.lengths.sum()) for batch in batches) - toy.train.num_tokens)
    assert sum(sizes[:3]) == extra.num_tokens and sizes[3:] == sizes[:3]
    assert max(sizes) - min(sizes) <= 7


def test_extra_text_is_learned_from(toy, tmp_path):
    """With samples of the same grammar the model does better; with another text it is refused to go on."""
    few = toy._replace(train=lines(toy.train, 0, 12))
    more = encode(toy_lines(4000, 3), toy.vocabulary)
    config = tiny("training.extra_tokens=2000")
    alone = train(few, config, tmp_path / "alone")
    taught = train(few._replace(extra=more), config, tmp_path / "taught")
    assert taught.best_valid < 0.98 * alone.best_valid
    with pytest.raises(ConfigError, match="another extra text"):
        train(few, config, tmp_path / "taught")
    with pytest.raises(ConfigError, match="needs training.method=em"):
        train(few._replace(extra=more), tiny(*GRADIENT), tmp_path / "gradient")


def test_shards_are_the_text_cut_at_line_ends(toy):
    parts = shards(toy.train, 300)
    assert len(parts) == round(toy.train.num_tokens / 300)
    begins = np.cumsum([0, *(part.num_tokens for part in parts)])
    for name in ("offsets", "literal_unk"):
        places = [getattr(part, name)[name == "offsets" :] + first for part, first in zip(parts, begins, strict=False)]
        assert np.concatenate(places).tolist() == getattr(toy.train, name)[name == "offsets" :].tolist()
    assert (np.concatenate([part.tokens for part in parts]) == toy.train.tokens).all()

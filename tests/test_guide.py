"""A teacher's evidence: posteriors by enumeration, clusters, and that training takes it up and lets it go."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from models import VOCABULARY, small_hmm
from vlhmm.cli.main import main
from vlhmm.config import override
from vlhmm.data.batches import sentence_batches
from vlhmm.data.corpora import load_texts
from vlhmm.data.text import encode
from vlhmm.errors import ConfigError
from vlhmm.experiments.presets import preset
from vlhmm.model.hmm import Kept
from vlhmm.training import dry_run as dry_run_module
from vlhmm.training.config import TrainingConfig
from vlhmm.training.expectation import expectation, prepare
from vlhmm.training.guide import LEAST, Guided, distances_to_clusters, make_guide
from vlhmm.training.schedule import guide_weight_at
from vlhmm.training.trainer import train

LINES = [["a", "b"], ["c"], ["d", "a", "e"]]


def teacher(tokens):
    """A vector after each word that tells the word, its place in the line, and some noise of both."""
    place = torch.arange(tokens.shape[1]).expand_as(tokens)
    return torch.stack([tokens.sin(), place.cos(), (tokens * 7 + place * 3).sin()], dim=-1)


def prepared_lines(blocks):
    batches = sentence_batches(encode(LINES, VOCABULARY), 8)
    group_of_word = torch.from_numpy(blocks.group_of_word)
    return batches, prepare(batches, group_of_word, blocks.num_groups)


def enumerated(potentials, slots, guide, prepared, weight):
    """Expected emissions (V, K) and moves {(from, to): (K, K)} of all lines, path by path, with evidence."""
    start, emission = potentials.log_start.exp(), potentials.log_emission.exp()
    tiles = potentials.transition.tiles(*prepared.pairs)
    evidence = guide.evidence.double() if slots is None else guide.evidence.double().gather(1, slots[guide.group])
    emitted, moved, token, logs = torch.zeros_like(emission), torch.zeros_like(tiles), 0, 0.0
    num_slots = emission.shape[1]
    for chain in prepared.chains:
        for row, length in enumerate(chain.lengths.tolist()):
            rows = token + row * chain.emit_of.shape[1] + torch.arange(length)
            words, edges = chain.emit_of[row, :length].tolist(), chain.edge_of[row, :length].tolist()
            told = evidence[rows] - evidence[rows].max(1, keepdim=True).values
            paths = {}
            for path in itertools.product(range(num_slots), repeat=length):
                p = start[chain.start_of[row, 0], path[0]]
                for t, z in enumerate(path):
                    p = p * emission[words[t], z] * math.exp(weight * told[t, z])
                    p = p * tiles[edges[t], path[t - 1], z] if t else p
                paths[path] = p
            total = sum(paths.values())
            logs += math.log(total)
            for path, p in paths.items():
                for t, z in enumerate(path):
                    emitted[words[t], z] += p / total
                    if t:
                        moved[edges[t], path[t - 1], z] += p / total
        token += chain.emit_of.numel()
    return emitted, moved, logs


@pytest.mark.parametrize("kept", [False, True], ids=["all", "kept"])
@pytest.mark.parametrize("kind", ["block-factored-coded", "paper", "scalar", "none", "uneven-block-factored"])
def test_guided_counts_are_those_of_enumeration(kind, kept):
    hmm, blocks = small_hmm(kind)
    batches, prepared = prepared_lines(blocks)
    num_slots = blocks.states_per_group
    tokens = [batch.tokens for batch in batches]
    generator = torch.Generator().manual_seed(0)
    guide = make_guide(teacher, tokens, prepared.chains, hmm.num_alive, num_slots, generator)
    slots = (
        torch.arange(num_slots)[None].repeat(blocks.num_groups, 1)[:, :: 2 if num_slots > 2 else 1] if kept else None
    )
    alive = (slots < hmm.num_alive[:, None]).sum(1) if kept else None
    with torch.no_grad():
        potentials = hmm.potentials(Kept(slots=slots, num_alive=alive))
    for weight in (0.0, 0.7, 3.0):
        expected = expectation(potentials, prepared, guided=Guided(guide, slots, weight))
        emitted, moved, logs = enumerated(potentials, slots, guide, prepared, weight)
        torch.testing.assert_close(expected.counts.emission, emitted, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(expected.counts.tiles, moved, rtol=1e-9, atol=1e-12)
        assert expected.log_likelihood == pytest.approx(logs, rel=1e-9)
        if weight == 0:
            plain = expectation(potentials, prepared)
            torch.testing.assert_close(expected.counts.tiles, plain.counts.tiles, rtol=1e-9, atol=1e-12)
            assert expected.log_likelihood == pytest.approx(plain.log_likelihood, rel=1e-12)


def test_guide_knows_every_token_and_no_dead_state():
    hmm, blocks = small_hmm("uneven-block-factored")
    batches, prepared = prepared_lines(blocks)
    tokens = [batch.tokens for batch in batches]
    guide = make_guide(teacher, tokens, prepared.chains, hmm.num_alive, 4, torch.Generator().manual_seed(0))
    live = torch.cat([chain.live.flatten() for chain in prepared.chains])
    assert (guide.evidence[live].max(1).values == 0).all()  # the nearest cluster of each token
    dead = torch.arange(4)[None] >= hmm.num_alive[guide.group, None]
    assert (guide.evidence[dead] == torch.tensor(LEAST).half()).all()


def test_clusters_are_found():
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    vectors = centres.repeat(50, 1) + 0.01 * torch.randn(150, 2, generator=torch.Generator().manual_seed(0))
    # beginning with points of one cluster may stay there: the best of a few draws is what counts here
    best = min(
        distances_to_clusters(vectors, 3, torch.Generator().manual_seed(s)).min(1).values.mean() for s in range(9)
    )
    assert best < 1e-3
    few = distances_to_clusters(vectors[:2], 5, torch.Generator())
    assert few.shape == (2, 2) and few.min(1).values.max() < 1e-6
    assert distances_to_clusters(vectors[:0], 3, torch.Generator()).shape == (0, 0)


def test_weight_is_full_then_falls_to_zero():
    settings = TrainingConfig(method="em", batch="sentences", guide_weight=2.0, guide_full=0.5, guide_until=0.75)
    weights = [guide_weight_at(settings, step, 100) for step in (0, 50, 55, 74, 75, 99)]
    assert weights == pytest.approx([2.0, 2.0, 1.6, 0.08, 0.0, 0.0])
    assert guide_weight_at(replace(settings, guide_weight=0.0), 0, 100) == 0
    at_once = replace(settings, guide_full=0.5, guide_until=0.5)
    assert [guide_weight_at(at_once, step, 100) for step in (49, 51)] == [2.0, 0.0]


# ---- training


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guide")
    draw = torch.Generator().manual_seed(3)
    for name, count in (("train", 200), ("valid", 40)):
        lines = []
        for _ in range(count):
            first = "ab"[torch.randint(2, (1,), generator=draw)]
            middle = ["c"] * int(torch.randint(1, 3, (1,), generator=draw))
            lines.append(" ".join([first, *middle, "d" if first == "a" else "e"]))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def texts(files):
    return load_texts(files / "train.txt", files / "valid.txt")


def guided_config(*changes):
    changes = ("model.num_states=16", "model.num_blocks=4", "training.guide_weight=1", *changes)
    return override(preset("tiny"), list(changes))


def remembers_first(tokens):
    """The perfect teacher of these lines: its vector is the word that the line began with."""
    return torch.nn.functional.one_hot(tokens[:, :1].expand_as(tokens), 8).float()


def test_training_is_guided_then_free_and_goes_on_to_the_same_bits(texts, tmp_path):
    config = guided_config("training.checks_per_epoch=1", "training.guide_until=0.8")
    whole = train(texts, config, tmp_path / "whole", teacher=remembers_first)
    assert whole.finished
    checks = [json.loads(line) for line in (tmp_path / "whole" / "journal.jsonl").read_text().splitlines()]
    checks = [check for check in checks if check["event"] == "check"]
    assert "train_under_guide" in checks[0] and "train_under_dropout" in checks[-1]
    stops = iter([False, False, True])
    assert not train(
        texts, config, tmp_path / "parts", teacher=remembers_first, should_stop=lambda: next(stops)
    ).finished
    assert train(texts, config, tmp_path / "parts", teacher=remembers_first).finished
    bits = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(bits[0][name], bits[1][name]) for name in bits[0])


def test_a_guide_shows_the_way(texts, tmp_path):
    """What a line began with decides its end: four iterations of plain EM learn that from the teacher, not alone."""
    free = ("model.parameterization=scalar", "training.optimizer=closed-form", "training.smoothing=0.1")
    change = (*free, "training.epochs=4", "training.calibrate=false", "training.state_dropout=0")
    guided = train(texts, guided_config(*change), tmp_path / "guided", teacher=remembers_first)
    alone = train(texts, guided_config(*change, "training.guide_weight=0"), tmp_path / "alone")
    assert guided.best_valid < 0.97 * alone.best_valid


def test_misuse_is_refused(texts, tmp_path):
    with pytest.raises(ConfigError, match="needs a teacher: --guide RUN"):
        train(texts, guided_config(), tmp_path / "run")
    with pytest.raises(ConfigError, match="needs a teacher: --guide RUN"):
        dry_run_module.dry_run(texts, guided_config(), None, "cpu", None)
    with pytest.raises(ConfigError, match="has no say"):
        train(texts, guided_config("training.guide_weight=0"), tmp_path / "run", teacher=teacher)
    with pytest.raises(ConfigError, match="neither with an extra text"):
        train(texts._replace(extra=texts.valid), guided_config(), tmp_path / "run", teacher=teacher)
    for change in ("training.em_tokens=100", "training.context=carry", "training.method=gradient"):
        with pytest.raises(ConfigError, match="a guide needs training.method=em"):
            guided_config(change)
    with pytest.raises(ConfigError, match="0 <= guide_full <= guide_until <= 1"):
        guided_config("training.guide_full=0.99")
    assert not (tmp_path / "run").exists()


def test_by_command(files, tmp_path, capsys):
    lstm, out = tmp_path / "lstm", tmp_path / "run"
    given = [str(files / "train.txt"), "--valid", str(files / "valid.txt")]
    small = ["--set", "hidden_size=8", "--set", "epochs=1", "--set", "num_streams=2"]
    assert main(["baseline", "lstm", *given, *small, "--out", str(lstm), "--quiet"]) == 0
    student = ["train", *given, "--preset", "tiny", "--states", "16", "--blocks", "4", "--quiet"]
    assert main([*student, "--guide", str(lstm), "--out", str(out)]) == 0
    about = json.loads((out / "config.json").read_text())
    assert about["training"]["guide_weight"] == 1.0 and str(lstm) in json.dumps(about)
    assert main([*student, "--guide", str(lstm), "--dry-run"]) == 0
    capsys.readouterr()
    assert main([*student, "--guide", str(out), "--out", str(tmp_path / "b")]) == 2
    other = tmp_path / "other.txt"
    other.write_text("x y z\nz y\n")
    changed = [
        "train",
        str(other),
        "--valid",
        str(other),
        "--preset",
        "tiny",
        "--states",
        "8",
        "--blocks",
        "2",
        "--quiet",
    ]
    assert main([*changed, "--guide", str(lstm), "--out", str(tmp_path / "b")]) == 2
    assert "another vocabulary" in capsys.readouterr().err
    counts = tmp_path / "kn"
    assert main(["baseline", "kn", *given, "--out", str(counts), "--quiet"]) == 0
    assert main([*student, "--guide", str(counts), "--out", str(tmp_path / "b")]) == 2
    assert "no neural model" in capsys.readouterr().err

"""A teacher's evidence: posteriors by enumeration, clusters, and that training takes it up and lets it go."""

import itertools
import json
import math
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from contract import next_word_distribution
from models import VOCABULARY, small_hmm
from vlhmm.baselines.training import build_model, default_config
from vlhmm.cli.main import main
from vlhmm.components.dropout import sample_kept
from vlhmm.config import override
from vlhmm.data.batches import sentence_batches, stream_batches
from vlhmm.data.corpora import load_texts
from vlhmm.data.text import encode
from vlhmm.errors import ConfigError
from vlhmm.hmm import DropoutMask
from vlhmm.training import dry_run as dry_run_module
from vlhmm.training.config import DistillationConfig
from vlhmm.training.distillation import Distillation
from vlhmm.training.distillation import evidence as evidence_module
from vlhmm.training.distillation.evidence import (
    LEAST,
    DistillationTargets,
    k_means,
    make_evidence,
    squared_distances,
    vectors_of,
)
from vlhmm.training.e_step import expectation, prepare
from vlhmm.training.presets import preset
from vlhmm.training.trainer import train

LINES = [["a", "b"], ["c"], ["d", "a", "e"]]


class Noisy:
    """A teacher whose vector after a word tells the word, its place in the line, and some noise of both."""

    def vectors_after(self, tokens):
        return self.vectors(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))

    def vectors(self, tokens, place):
        return torch.stack([tokens.sin(), place.cos(), (tokens * 7 + place * 3).sin()], dim=-1)


teacher = Noisy()


def prepared_lines(blocks):
    batches = sentence_batches(encode(LINES, VOCABULARY), 8)
    block_of_word = torch.from_numpy(blocks.block_of_word)
    return batches, prepare(batches, block_of_word, blocks.num_blocks)


def for_states(told, kept, group):
    """The log evidence in `told` for the states of a group that can be entered, relative to the best of them."""
    slots = list(range(len(told))) if kept.slots is None else kept.slots[group].tolist()
    alive = len(slots) if kept.num_alive is None else int(kept.num_alive[group])
    values = [told[slot].item() for slot in slots[:alive]]
    return [value - max(values) for value in values]


def enumerated(potentials, kept, evidence, prepared, weight):
    """Expected starts (M, K), emissions (V, K) and moves (P, K, K) of all lines, path by path, with evidence."""
    start, emission = potentials.log_start.exp(), potentials.log_emission.exp()
    tiles = potentials.transition.tiles(*prepared.pairs)
    begun, emitted, moved, logs = torch.zeros_like(start), torch.zeros_like(emission), torch.zeros_like(tiles), 0.0
    for chain, told_all in zip(prepared.chains, evidence, strict=True):
        told_all = told_all.double().view(*chain.emit_of.shape, -1)
        for row, length in enumerate(chain.lengths.tolist()):
            words, edges = chain.emit_of[row, :length].tolist(), chain.edge_of[row, :length].tolist()
            told = []  # per token, {kept state: log evidence relative to the best of those that can be entered}
            for t in range(length):
                told.append(for_states(told_all[row, t], kept, chain.start_of[row, t]))
            paths = {}
            for path in itertools.product(*(range(len(values)) for values in told)):
                p = start[chain.start_of[row, 0], path[0]].item()
                for t, z in enumerate(path):
                    p *= emission[words[t], z].item() * math.exp(weight * told[t][z])
                    p *= tiles[edges[t], path[t - 1], z].item() if t else 1
                paths[path] = p
            total = sum(paths.values())
            logs += math.log(total)
            for path, p in paths.items():
                begun[chain.start_of[row, 0], path[0]] += p / total
                for t, z in enumerate(path):
                    emitted[words[t], z] += p / total
                    if t:
                        moved[edges[t], path[t - 1], z] += p / total
    return begun, emitted, moved, logs


def evidence_of(hmm, blocks, batches):
    generator, block_of_word = torch.Generator().manual_seed(0), torch.from_numpy(blocks.block_of_word)
    return make_evidence(teacher, batches, block_of_word, hmm.num_alive, blocks.states_per_block, generator)


def kept_states(hmm, blocks, dropout):
    if not dropout:
        return DropoutMask()
    generator = torch.Generator().manual_seed(5)
    slots, alive = sample_kept(hmm.num_alive, blocks.states_per_block, dropout, generator)
    return DropoutMask(slots=slots, num_alive=alive)


KINDS = ["block-factored-coded", "paper", "scalar", "none", "uneven-block-factored", "low-rank"]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_guided_counts_are_those_of_enumeration(kind, dropout):
    hmm, blocks = small_hmm(kind)
    batches, prepared = prepared_lines(blocks)
    evidence, _ = evidence_of(hmm, blocks, batches)
    kept = kept_states(hmm, blocks, dropout)
    with torch.no_grad():
        potentials = hmm.potentials(kept)
    for weight in (0.0, 0.7, 3.0):
        expected = expectation(potentials, prepared, evidence=DistillationTargets(evidence, kept, weight))
        begun, emitted, moved, logs = enumerated(potentials, kept, evidence, prepared, weight)
        same = {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(expected.counts.start, begun, **same)
        torch.testing.assert_close(expected.counts.emission, emitted, **same)
        if kind == "low-rank":  # its counts are those of channels; of moves it keeps where they lead
            torch.testing.assert_close(expected.counts.leave, moved.sum(-1), **same)
        else:
            torch.testing.assert_close(expected.counts.tiles, moved, **same)
        assert expected.log_likelihood == pytest.approx(logs, rel=1e-9)
        if weight == 0:
            plain = expectation(potentials, prepared)
            assert expected.log_likelihood == pytest.approx(plain.log_likelihood, rel=1e-12)


def test_evidence_is_its_formula(monkeypatch):
    """With as many clusters as asked for, known centres: distances beyond the nearest, over the mean nearest."""
    hmm, blocks = small_hmm("uneven-block-factored")
    batches, prepared = prepared_lines(blocks)
    centres = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 5.0], [5.0, 5.0, 5.0]])
    monkeypatch.setattr(evidence_module, "k_means", lambda _vectors, number, _generator: centres[:number])
    evidence = torch.cat(evidence_of(hmm, blocks, batches)[0])
    vectors = torch.cat([teacher.vectors_after(batch.tokens).flatten(0, 1) for batch in batches])
    group, live = (
        torch.cat([part.flatten() for part in parts])
        for parts in zip(*((c.start_of, c.live) for c in prepared.chains), strict=True)
    )
    distances = {}
    for token in live.nonzero()[:, 0].tolist():
        alive = int(hmm.num_alive[group[token]])
        distances[token] = [(vectors[token] - centres[k]).square().sum().item() for k in range(alive)]
    mean = sum(min(d) for d in distances.values()) / len(distances)
    assert mean > 2  # so that a missing division would show
    for token, d in distances.items():
        expected = [-(value - min(d)) / mean for value in d] + [LEAST] * (4 - len(d))
        assert evidence[token].tolist() == pytest.approx(expected, rel=2e-3, abs=2e-3)
    assert (evidence[~live] == torch.tensor(LEAST).half()).all()


def test_a_teacher_reads_on_where_a_stream_continues():
    text = encode(LINES, VOCABULARY)
    batches = stream_batches(text, 3, 2, VOCABULARY.eos, "carry")  # three streams of three tokens
    assert [batch.continues for batch in batches] == [False, True]
    found = vectors_of(teacher, [*batches, *batches])  # read again, they begin again
    whole = teacher.vectors_after(torch.from_numpy(text.tokens).view(3, 3))
    for first, second in (found[:2], found[2:]):
        torch.testing.assert_close(torch.cat([first.view(3, 2, 3), second.view(3, 1, 3)], dim=1), whole)


def test_vectors_after_a_word_are_what_the_next_is_predicted_from():
    for kind in ("ff", "lstm"):
        model = build_model(kind, VOCABULARY, replace(default_config(kind), hidden_size=5))
        context = torch.tensor([[2, 3, 4, 6]])
        vectors = model.vectors_after(context)[0]
        for length in (1, 2, 4):
            logits = model.embedding.double() @ vectors[length - 1].double() + model.bias.double()
            expected = torch.from_numpy(next_word_distribution(model, context[0, :length]))
            torch.testing.assert_close(logits.softmax(0).detach(), expected, rtol=1e-5, atol=1e-7)


def test_clusters_are_found():
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    vectors = centres.repeat(50, 1) + 0.01 * torch.randn(150, 2, generator=torch.Generator().manual_seed(0))
    # beginning with points of one cluster may stay there: the best of a few draws is what counts here
    best = min(
        squared_distances(vectors, k_means(vectors, 3, torch.Generator().manual_seed(s))).min(1).values.mean()
        for s in range(9)
    )
    assert best < 1e-3
    few = k_means(vectors[:2], 5, torch.Generator())
    assert squared_distances(vectors[:2], few).min(1).values.max() < 1e-6 and few.shape == (2, 2)
    assert k_means(vectors[:0], 3, torch.Generator()).shape == (0, 2)


def test_weight_is_full_then_falls_to_zero():
    settings = DistillationConfig(weight=2.0, full=0.5, until=0.75)
    weights = [settings.weight_at(step, 100) for step in (0, 50, 55, 74, 75, 99)]
    assert weights == pytest.approx([2.0, 2.0, 1.6, 0.08, 0.0, 0.0])
    assert replace(settings, weight=0.0).weight_at(0, 100) == 0
    at_once = replace(settings, full=0.5, until=0.5)
    assert [at_once.weight_at(step, 100) for step in (49, 51)] == [2.0, 0.0]


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
    changes = ("model.num_states=16", "model.num_blocks=4", "distillation.weight=1", *changes)
    return override(preset("tiny"), list(changes))


class RemembersFirst:
    """The perfect teacher of these lines: its vector is the word that the line began with, and it ends them rightly."""

    def __init__(self, vocabulary):
        self.vocabulary, self.id = vocabulary, vocabulary.words.index

    def vectors_after(self, tokens):
        return torch.nn.functional.one_hot(tokens[:, :1].expand_as(tokens), 8).float()

    def sample(self, num_tokens, generator, *, progress):
        """Lines like those of the text: about half of the c are followed by another."""
        written = []
        while sum(len(line) + 1 for line in written) < num_tokens:
            first = torch.randint(2, (1,), generator=generator).item()
            middle = ["c"] * int(torch.randint(1, 3, (1,), generator=generator))
            written.append(["ab"[first], *middle, "de"[first]])
            progress(len(written), num_tokens)
        return encode(written, self.vocabulary)


STREAMS = ["training.batch=streams", "training.context=carry", "training.num_streams=4", "training.segment_length=16"]


@pytest.mark.parametrize("how", ["silent", "extra", "writing", "streams"])
def test_training_is_guided_then_free_and_goes_on_to_the_same_bits(texts, tmp_path, how):
    few = texts.valid.num_tokens // 3  # an extra text in three parts, one an E-step
    of_how = {"writing": [f"distillation.text={3 * few}"], "streams": STREAMS}
    changes = of_how.get(how, [])
    if how == "extra":
        texts = texts._replace(extra=texts.valid)
    config = guided_config(
        "training.checks_per_epoch=1", "distillation.until=0.8", f"training.extra_tokens={few}", *changes
    )
    remembers_first = RemembersFirst(texts.vocabulary)
    whole = train(texts, config, tmp_path / "whole", teacher=remembers_first)
    assert whole.finished
    checks = [json.loads(line) for line in (tmp_path / "whole" / "journal.jsonl").read_text().splitlines()]
    checks = [check for check in checks if check["event"] == "check"]
    assert "train_under_guide" in checks[0] and "train_under_dropout" in checks[-1]
    stops = iter([False, False, True])
    assert not train(
        texts, config, tmp_path / "parts", teacher=remembers_first, should_stop=lambda: next(stops)
    ).finished
    with pytest.raises(ConfigError, match="another teacher"):
        train(texts, config, tmp_path / "parts", teacher=teacher)
    assert train(texts, config, tmp_path / "parts", teacher=remembers_first).finished
    bits = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(bits[0][name], bits[1][name]) for name in bits[0])


def test_a_guide_shows_the_way(texts, tmp_path):
    """What a line began with decides its end: four iterations of plain EM learn that from the teacher, not alone."""
    free = ("model.parameterization=scalar", "training.optimizer=closed-form", "training.smoothing=0.1")
    change = (*free, "training.epochs=4", "training.calibrate=false", "training.state_dropout=0")
    guided = train(texts, guided_config(*change), tmp_path / "guided", teacher=RemembersFirst(texts.vocabulary))
    alone = train(texts, guided_config(*change, "distillation.weight=0"), tmp_path / "alone")
    assert guided.best_valid < 0.97 * alone.best_valid


def test_a_few_lines_are_enough_with_a_teacher_that_speaks(files, texts, tmp_path):
    """These lines never say c twice, as half of the others do; the teacher says it after every c."""
    few = tmp_path / "few.txt"
    few.write_text("a c d\nb c e\n" * 8)
    corpus = load_texts(few, files / "valid.txt")
    change = ("training.calibrate=false", "training.epochs=30", "training.checks_per_epoch=30")
    speaks = RemembersFirst(corpus.vocabulary)
    silent = train(corpus, guided_config(*change), tmp_path / "silent", teacher=speaks)
    read = train(corpus, guided_config(*change, "distillation.text=400"), tmp_path / "read", teacher=speaks)
    assert read.best_valid < 0.9 * silent.best_valid


def test_writing_takes_time_once(texts, tmp_path):
    class Slow(RemembersFirst):
        def sample(self, num_tokens, generator, *, progress):
            time.sleep(1.5)
            return super().sample(num_tokens, generator, progress=progress)

    config = guided_config("distillation.text=50", "training.epochs=2", "training.calibrate=false")
    teacher = Slow(texts.vocabulary)
    stops = iter([False, True])
    begun = train(texts, config, tmp_path, teacher=teacher, should_stop=lambda: next(stops))
    assert 1.5 < begun.seconds and not begun.finished
    assert train(texts, config, tmp_path, teacher=teacher).seconds - begun.seconds < 1.5


@pytest.mark.parametrize("change, times", [("distillation.text=2000", 3)])
def test_evidence_beyond_the_memory_is_refused(texts, tmp_path, change, times):
    """Of tokens with all that is drawn or written beside them, which no E-step holds at once."""
    speaks = RemembersFirst(texts.vocabulary)
    about = 2 * 4 * times * texts.train.num_tokens  # 16 states in 4 blocks; the text has about 1,000 tokens
    with pytest.raises(ConfigError, match="raise --memory, or take less text"):
        train(texts, guided_config(change), tmp_path / "run", teacher=speaks, memory=int(0.8 * about))
    enough = 10 * about  # for tiles and counts, too
    assert train(texts, guided_config(change), tmp_path / "run", teacher=speaks, memory=enough).finished


def test_of_a_text_in_shares_only_the_evidence_of_one_is_kept(texts, tmp_path, monkeypatch):
    held, evidence = [], Distillation.evidence

    def watched(self, batches, mask, step):
        found = evidence(self, batches, mask, step)
        held.append((len(self._evidence), len(batches)))
        return found

    monkeypatch.setattr(Distillation, "evidence", watched)
    train(texts, guided_config("training.em_tokens=100"), tmp_path / "run", teacher=teacher)
    assert len(held) > 8 and all(kept <= of_step for kept, of_step in held)


def test_misuse_is_refused(texts, tmp_path):
    with pytest.raises(ConfigError, match="needs a teacher: --guide RUN"):
        train(texts, guided_config(), tmp_path / "run")
    with pytest.raises(ConfigError, match="needs a teacher: --guide RUN"):
        dry_run_module.dry_run(texts, guided_config(), None, "cpu", None)
    with pytest.raises(ConfigError, match="has no effect unless"):
        train(texts, guided_config("distillation.weight=0"), tmp_path / "run", teacher=teacher)
    for name in ("text",):
        with pytest.raises(ConfigError, match=f"{name} cannot be used with an extra text"):
            config = guided_config(f"distillation.{name}=2")
            train(texts._replace(extra=texts.valid), config, tmp_path / "run", teacher=teacher)
        with pytest.raises(ConfigError, match=f"{name}=-1"):
            guided_config(f"distillation.{name}=-1")
        with pytest.raises(ConfigError, match=f"{name}=2 has no effect without a teacher"):
            guided_config("distillation.weight=0", f"distillation.{name}=2")
    carried_shares = ("training.batch=streams", "training.context=carry", "training.em_tokens=100")
    for changes in (carried_shares, ("training.batch=streams",), ("training.method=gradient",)):
        with pytest.raises(ConfigError, match="a guide needs training.method=em"):
            guided_config(*changes)
    for name in ("text",):
        with pytest.raises(ConfigError, match="writes line by line"):
            guided_config("training.batch=streams", "training.context=carry", f"distillation.{name}=2")
    with pytest.raises(ConfigError, match="0 <= full <= until <= 1"):
        guided_config("distillation.full=0.99")
    assert not (tmp_path / "run").exists()


def test_by_command(files, tmp_path, capsys):
    lstm, out = tmp_path / "lstm", tmp_path / "run"
    given = [str(files / "train.txt"), "--valid", str(files / "valid.txt")]
    small = ["--set", "hidden_size=8", "--set", "epochs=1", "--set", "num_streams=2"]
    assert main(["baseline", "lstm", *given, *small, "--out", str(lstm), "--quiet"]) == 0
    student = ["train", *given, "--preset", "tiny", "--states", "16", "--blocks", "4", "--quiet"]
    assert main([*student, "--guide", str(lstm), "--out", str(out)]) == 0
    about = json.loads((out / "config.json").read_text())
    assert about["distillation"]["weight"] == 1.0 and str(lstm) in json.dumps(about)
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
    assert "is not a neural model" in capsys.readouterr().err

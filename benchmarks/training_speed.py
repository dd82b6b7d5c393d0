"""Training contestants: what `vlhmm train` does a step, and the LSTM it is compared with.

Each is checked, then warmed up (`prepare`), then timed a step at a time (`step`). The HMMs run the trainer's
own step; the LSTM reads the same batches in the same order.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from benchmarks.exactness import check_at_most, check_step, few_sentences
from benchmarks.material import read_blocks, read_corpus
from vlhmm.baselines.lstm import LSTM
from vlhmm.components.config import ModelConfig
from vlhmm.data.batches import Batch, sentence_batches, stream_batches
from vlhmm.training.config import RunConfig, TrainingConfig
from vlhmm.training.e_step import expectation
from vlhmm.training.plan import make_plan
from vlhmm.training.run_folder import RunFolder
from vlhmm.training.trainer import Trainer

WARM_UP_STEPS = 2
SEGMENT_LENGTH = 32  # of the package's LSTM on streams: the paper's


def run_config(settings: dict[str, Any]) -> RunConfig:
    """Return a contestant's configuration: block-factored with linear maps by default, or the paper's softmax."""
    ours = settings["transition"] == "block-factored"
    model = ModelConfig(
        num_states=settings["num_states"],
        num_blocks=settings["num_blocks"],
        hidden_size=settings["hidden_size"],
        transition=settings["transition"],
        embedding="additive" if ours else "independent",
        network=settings.get("network", "linear") if ours else "residual",
        within=settings.get("within", "softmax"),
        source_block_init=8.0 if ours else 0.0,
    )
    training = TrainingConfig(
        method=settings.get("method", "gradient"),
        batch="sentences",
        batch_tokens=settings["batch_tokens"],
        em_tokens=settings.get("em_tokens"),
        state_dropout=settings["state_dropout"],
        rate=1e-3,
        schedule="constant",
        seed=settings["seed"],
    )
    return RunConfig(model=model, training=training)


class HMMTraining:
    """The trainer's step, by gradient."""

    warm_up_steps = WARM_UP_STEPS

    def __init__(self, settings: dict[str, Any]) -> None:
        folder = Path(settings["folder"])
        self.settings, self.corpus = settings, read_corpus(folder)
        self.blocks = read_blocks(folder, settings["num_states"], settings["num_blocks"])
        run = RunFolder(folder / "run")  # nothing is written there: no step validates or saves
        self.trainer = Trainer(self.corpus, run_config(settings), run, self.blocks, "cpu", settings.get("memory"))

    def prepare(self) -> dict[str, Any]:
        """Return the check's differences. This also compiles the kernels and touches the memory."""
        check = self.check(few_sentences(self.corpus.train, self.settings.get("check_tokens", 24)))
        for _ in range(self.warm_up_steps):
            self.trainer.train_step(self.trainer.batches())
        return {"check": check, "parameters": self.trainer.num_parameters}

    def check(self, text: Any) -> dict[str, float]:
        with torch.no_grad():
            potentials = self.trainer.hmm.potentials(self.trainer.mask())
        batches = sentence_batches(text, 1 << 14)
        return check_step(potentials, batches, self.trainer.block_of_word, self.blocks.num_blocks)

    def step(self) -> dict[str, Any]:
        """Return {seconds, tokens} of one step."""
        began = time.perf_counter()
        tokens = self.trainer.train_step(self.trainer.batches())
        return {"seconds": time.perf_counter() - began, "tokens": tokens}


class SoftmaxTraining(HMMTraining):
    """The paper's model: one softmax over all states, streamed over row tiles."""

    warm_up_steps = 1

    def step(self) -> dict[str, Any]:
        """Return {seconds, tokens, flops, transition_flops} of one step."""
        occurring = source_blocks(self.trainer.batches(), self.trainer.block_of_word)
        kept = self.trainer.mask().slots
        slots = self.blocks.states_per_block if kept is None else kept.shape[1]
        parts = softmax_flops(
            self.blocks.num_blocks * slots,
            slots,
            occurring,
            self.settings["hidden_size"],
            self.blocks.vocab_size,
        )
        return {**super().step(), "flops": sum(parts.values()), "transition_flops": parts["transitions"]}


def source_blocks(batches: list[Batch], block_of_word: Tensor) -> int:
    """Return how many distinct blocks some token of these batches is left from: only their rows are needed."""
    left = []
    for batch in batches:
        live = torch.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
        moves = live[:, 1:] & ~batch.restart[:, 1:]
        left.append(block_of_word[batch.tokens[:, :-1][moves]])
    return len(torch.cat(left).unique())


def softmax_flops(num_states: int, slots: int, occurring: int, width: int, vocab_size: int) -> dict[str, float]:
    """Return the operations in matrix products of one softmax step, by part (a multiply-add is two).

    transitions: for the rows of blocks that occur, the logits once for the tiles' normalizer and once more in
    the gradient pass, and the two products of the gradient. networks: three residual networks of two layers,
    forward and twice that backward. emissions: every word against its own block's states, likewise.
    """
    rows = occurring * slots
    return {
        "transitions": 4 * 2.0 * rows * num_states * width,
        "networks": 3 * 2 * 3 * 2.0 * num_states * width**2,
        "emissions": 3 * 2.0 * slots * vocab_size * width,
    }


class EMTraining(HMMTraining):
    """Generalized EM: the E-step apart, and the whole iteration as the trainer runs it."""

    def prepare(self) -> dict[str, Any]:
        """Return the check's differences, and how much text one E-step reads."""
        check = self.check(few_sentences(self.corpus.train, self.settings.get("check_tokens", 24)))
        self.expectation()
        return {
            "check": check,
            "parameters": self.trainer.num_parameters,
            "m_steps": self.trainer.settings.m_step_updates,
        }

    def expectation(self) -> dict[str, Any]:
        """Return {potentials_seconds, estep_seconds, tokens, pairs}: networks, then tiles and expected counts."""
        trainer = self.trainer
        prepared = trainer.prepared.get(trainer.batches())
        kept, began = trainer.mask(), time.perf_counter()
        with torch.no_grad():
            potentials = trainer.hmm.potentials(kept)
        made = time.perf_counter()
        expected = expectation(potentials, prepared, None, trainer.buffers, trainer.memory)
        return {
            "potentials_seconds": made - began,
            "estep_seconds": time.perf_counter() - made,
            "tokens": expected.tokens,
            "pairs": len(prepared.pairs.from_block),
        }

    def step(self) -> dict[str, Any]:
        """Return an E-step alone, then a whole iteration: {estep_seconds, seconds, tokens, …}."""
        return {**self.expectation(), **super().step()}


class PlainLSTM(nn.Module):
    """The paper's 2 x 256 LSTM as one writes it in torch: tied embeddings, full softmax, no dropout."""

    def __init__(self, vocab_size: int, hidden_size: int, eos: int) -> None:
        super().__init__()
        self.eos = eos
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        nn.init.uniform_(self.embedding.weight, -(hidden_size**-0.5), hidden_size**-0.5)
        self.lstm = nn.LSTM(hidden_size, hidden_size, num_layers=2, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def loss(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the mean of -log p(x_t | x_<t) over the live tokens of padded rows, each from the start."""
        live = torch.arange(tokens.shape[1])[None] < lengths[:, None]
        inputs = torch.cat([torch.full_like(tokens[:, :1], self.eos), tokens[:, :-1]], dim=1)
        # what comes after a row's end cannot reach its tokens: padded rows need no packing, and run faster
        hidden, _ = self.lstm(self.embedding(inputs))
        return cross_entropy(linear(hidden[live], self.embedding.weight, self.bias), tokens[live])


class LSTMTraining:
    """AdamW on the plain LSTM, the same sentence batches as the HMM's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.corpus = read_corpus(Path(settings["folder"]))
        eos = self.corpus.vocabulary.eos
        torch.manual_seed(settings["seed"])  # nn.LSTM draws its weights from the global generator; this is our process
        self.model = PlainLSTM(len(self.corpus.vocabulary), settings["hidden_size"], eos)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        plan = make_plan(self.corpus.train, run_config({**settings, "transition": "block-factored"}).training, eos)
        self.batches, self.number = [batch for step in plan(0) for batch in step], 0

    def prepare(self) -> dict[str, Any]:
        text = few_sentences(self.corpus.train, 24)
        with torch.no_grad():
            (batch,) = sentence_batches(text, 1 << 14)
            together = self.model.loss(batch.tokens, batch.lengths).item()
            apart = sum(
                length * self.model.loss(row[None, :length], torch.tensor([length])).item()
                for row, length in zip(batch.tokens, batch.lengths.tolist(), strict=True)
            )
        difference = abs(together - apart / text.num_tokens)
        check_at_most("the LSTM's loss on padded rows", difference, 1e-4)
        for _ in range(WARM_UP_STEPS):
            self.step()
        return {"check": {"loss": difference}, "parameters": sum(p.numel() for p in self.model.parameters())}

    def step(self) -> dict[str, Any]:
        """Return {seconds, tokens} of one step."""
        batch = self.batches[self.number % len(self.batches)]
        self.number += 1
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.loss(batch.tokens, batch.lengths).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        return {"seconds": time.perf_counter() - began, "tokens": int(batch.lengths.sum())}


class PackageLSTM:
    """This package's own LSTM at its best: streams without padding, softmax and its gradient in one pass."""

    def __init__(self, settings: dict[str, Any]) -> None:
        corpus = read_corpus(Path(settings["folder"]))
        generator = torch.Generator().manual_seed(settings["seed"])
        self.model = LSTM(corpus.vocabulary, generator, settings["hidden_size"], dropout=0.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        streams = max(1, settings["batch_tokens"] // SEGMENT_LENGTH)
        batches = stream_batches(corpus.train, streams, SEGMENT_LENGTH, corpus.vocabulary.eos, "carry")
        whole = [batch for batch in batches if int(batch.lengths.min()) == batch.tokens.shape[1]]
        self.batches, self.number = whole or batches, 0

    def prepare(self) -> dict[str, Any]:
        batch = self.batches[0]
        rows, lengths = batch.tokens[:2], batch.lengths[:2]
        with torch.no_grad():
            loss, _ = self.model.loss(rows, lengths, self.model.start(len(rows)))
        log_prob, _ = self.model.score_batch(rows, lengths, self.model.start(len(rows)))
        difference = abs(loss.item() + log_prob.sum().item() / int(lengths.sum()))
        check_at_most("the package's LSTM's loss", difference, 1e-4)
        for _ in range(WARM_UP_STEPS):
            self.step()
        return {"check": {"loss": difference}, "parameters": sum(p.numel() for p in self.model.parameters())}

    def step(self) -> dict[str, Any]:
        """Return {seconds, tokens} of one step."""
        batch = self.batches[self.number % len(self.batches)]
        self.number += 1
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss, _ = self.model.loss(batch.tokens, batch.lengths, self.model.start(len(batch.lengths)))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        return {"seconds": time.perf_counter() - began, "tokens": int(batch.lengths.sum())}

"""Scoring a long text with cached parameters, as `vlhmm evaluate` does."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.exactness import check_scores
from benchmarks.material import head, lines_of, read_blocks, read_corpus
from benchmarks.training_speed import run_config
from vlhmm.distributions import HMMDistributions
from vlhmm.evaluation.perplexity import evaluate
from vlhmm.language_model import DEFAULT_MEMORY, HMMLanguageModel
from vlhmm.training.model import build_hmm


def random_model(settings: dict[str, Any]) -> HMMLanguageModel:
    """Return an untrained block-factored model of the given sizes: it costs what a trained one does."""
    folder = Path(settings["folder"])
    corpus = read_corpus(folder)
    blocks = read_blocks(folder, settings["num_states"], settings["num_blocks"])
    config = run_config({**settings, "transition": "block-factored"})
    with torch.no_grad():
        hmm = build_hmm(config, blocks, corpus.train)
        tables = HMMDistributions(hmm.potentials(), blocks)
    return HMMLanguageModel(corpus.vocabulary, tables, "reset", settings.get("memory") or DEFAULT_MEMORY)


class Scoring:
    """log p of every token of a text, each line from the start."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.text = head(read_corpus(Path(settings["folder"])).train, settings["scoring_tokens"])
        self.model = random_model(settings)
        self.sample = settings["scoring_sample"]

    def prepare(self) -> dict[str, Any]:
        """Return the largest difference from the reference implementation on some lines, and the time of a first pass."""
        lines = np.unique(np.linspace(0, self.text.num_sentences - 1, self.sample).astype(np.int64))
        sample = lines_of(self.text, lines)
        difference = check_scores(self.model, sample)
        began = time.perf_counter()
        evaluate(self.model, self.text, "reset")  # makes the transition tiles this text needs
        return {
            "check": {"max_abs_diff": difference, "tokens": sample.num_tokens},
            "first_pass_seconds": time.perf_counter() - began,
        }

    def step(self) -> dict[str, Any]:
        """Return {seconds, tokens} of a pass over the text with everything cached."""
        began = time.perf_counter()
        evaluate(self.model, self.text, "reset")
        return {"seconds": time.perf_counter() - began, "tokens": self.text.num_tokens}

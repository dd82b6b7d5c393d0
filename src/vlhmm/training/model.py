"""The model of a run: untrained, and as its folder has it."""

from pathlib import Path

import numpy as np

from vlhmm.clustering.blocks import Blocks
from vlhmm.data.text import Text
from vlhmm.hmm import HMM
from vlhmm.training.config import RunConfig
from vlhmm.training.run_folder import RunFolder


def build_hmm(config: RunConfig, blocks: Blocks, text: Text | None = None, counts: np.ndarray | None = None) -> HMM:
    """Build the untrained model of a run; with the training text its first biases are log frequencies.

    `counts` of words, (V,), replace those of the text if words are held out.
    """
    starts = None
    if text is not None:
        if counts is None:
            counts = text.word_counts(blocks.vocab_size).astype(np.float64)
        starts = text.start_counts(blocks.vocab_size).astype(np.float64)
    return HMM(config.model, blocks, config.training.seed, counts, starts)


def load_hmm(path: str | Path) -> tuple[HMM, RunFolder, RunConfig]:
    """Load the trained model of a run folder, best on the validation text."""
    folder = RunFolder(path)
    hmm, _, _, config = folder.load()
    return hmm, folder, config

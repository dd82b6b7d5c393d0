"""How fast a model answers queries: a run's, or an untrained one of 2^15 states, which costs the same."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import material
from benchmarks.scoring_speed import random_model
from benchmarks.sizes import FULL, Sizes
from vlhmm.language_model import HMMLanguageModel


def untrained_model(
    sizes: Sizes = FULL,
    corpus: str = "ptb",
    data_dir: str | None = None,
    memory: int | None = None,
    seed: int = 0,
    note: Callable[[str], None] = lambda line: None,
) -> tuple[HMMLanguageModel, dict[str, Any]]:
    """Return (a block-factored model with the corpus's vocabulary and Brown blocks, what it is)."""
    text, instead = material.choose_corpus(corpus, data_dir, sizes.train_tokens, seed)
    if instead:
        note(f"{instead}: taking the vocabulary of {text.name} instead")
    with tempfile.TemporaryDirectory(prefix="vlhmm-bench-") as scratch:
        material.write_corpus(text, Path(scratch))
        material.write_blocks(text, sizes.scoring_blocks, sizes.exchange_sweeps, Path(scratch))
        settings = {
            "folder": scratch,
            "num_states": sizes.scoring_states,
            "num_blocks": sizes.scoring_blocks,
            "hidden_size": sizes.hidden_size,
            "state_dropout": 0.0,
            "batch_tokens": sizes.batch_tokens,
            "memory": memory,
            "seed": seed,
        }
        model = random_model(settings)
    return model, {"corpus": text.name, "corpus_instead": instead, "sizes": sizes.name}

"""A teacher, and the text it generates for a run: every E-step reads part of it in addition to the training text."""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlhmm.data.corpora import Corpus
from vlhmm.data.text import Text, encode, read_lines, write_text
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.training.config import RunConfig
from vlhmm.training.plan import generator_for
from vlhmm.training.run_folder import RunFolder

SECONDS_BETWEEN_LINES = 20.0  # of progress


class Teacher(Protocol):
    """A neural language model."""

    def vectors_after(self, tokens: Int[Tensor, "row time"]) -> Float[Tensor, "row time width"]:
        """Return a vector after each token of rows that begin a text: what the next word is predicted from."""

    def sample(self, num_tokens: int, generator: torch.Generator, *, progress: Callable[[int, int], None]) -> Text:
        """Generate about this many tokens of text; `progress` gets the tokens done and in all."""


def teacher_text(
    teacher: Teacher,
    settings: RunConfig,
    folder: RunFolder,
    vocabulary: Vocabulary,
    log: Callable[[str], None],
) -> Text:
    """Generate a text with the teacher, or read it from the run folder if it was generated before."""
    if not folder.text_path.exists():
        log(f"the teacher generates {settings.distillation.text:,} tokens: a minute or two per million")
        progress = throttled_progress(log, "the teacher has written")
        text = teacher.sample(settings.distillation.text, generator_for(settings.training.seed, "text", 0), progress=progress)
        write_text(folder.text_path, text, vocabulary)
    return encode(read_lines(folder.text_path), vocabulary)


def sum_of_vectors(corpus: Corpus, teacher: Teacher) -> float:
    """Return a number that identifies the teacher."""
    words = torch.from_numpy(corpus.train.tokens[:64].astype(np.int64))
    return teacher.vectors_after(words[None]).sum(dtype=torch.float64).item()


def throttled_progress(log: Callable[[str], None], what: str) -> Callable[[int, int], None]:
    """Return a function that logs the progress of a long computation, at most every few seconds."""
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            log(f"{what} {done / total:.0%}")
            last = time.monotonic()

    return progress

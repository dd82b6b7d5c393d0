"""States, words and blocks for the page and its routes. Input: a model and its run. Output: JSON values.

Example sentences are drawn from the model together with their states, so that a sentence listed under a state is one
that the model wrote while in it.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from vlhmm.analysis.inspect import Inspector
from vlhmm.analysis.stationary import usage_of
from vlhmm.data.user_text import generator_of
from vlhmm.lattice.sampling import Draw
from vlhmm.process import process_of
from vlhmm.queries.sample import next_states

_EXAMPLES = 2_000
_EXAMPLE_WORDS = 40


class Explorer:
    """Answers about what states, words and blocks stand for; the usage of the states is found once."""

    def __init__(self, model: Any, run: str | Path | None, memory: int | None = None) -> None:
        self.model, self.run, self.memory = model, run, memory
        self.progress: Callable[[int, float], None] | None = None

    @cached_property
    def inspector(self) -> Inspector:
        return Inspector(self.model, usage_of(self.model, self.run, self.memory, self.progress))

    def summary(self, top: int = 20) -> dict[str, Any]:
        return plain(self.inspector.summary(top))

    def state(self, state: int, top: int = 10) -> dict[str, Any]:
        """Return a state's words, neighbours, usage and example sentences."""
        return plain(self.inspector.state(state, top)) | {"examples": self.examples.get(state, [])[:5]}

    def word(self, word: str, top: int = 10) -> dict[str, Any]:
        """Return the states a word comes from and what stands around it."""
        return plain(self.inspector.word(word, top))

    def block(self, block: int, top: int = 10) -> dict[str, Any]:
        """Return a block's words, states, neighbours and usage."""
        return plain(self.inspector.block(block, top))

    @cached_property
    def block_map(self) -> dict[str, Any]:
        r"""The block-by-block matrix $p(block' | block)$, blocks in the order of their numbers.

        Brown clustering numbers blocks along its tree, so that neighbours in the matrix are neighbours in the tree.
        """
        summary = self.inspector.summary(1)
        count = summary.num_blocks
        if count is None:
            return {"blocks": [], "matrix": []}
        blocks, matrix = [], []
        for number in range(count):
            view = self.inspector.block(number, max(count, 5))
            row = [0.0] * count
            for share in view.next_blocks:
                row[share.block] = round(share.probability, 6)
            matrix.append(row)
            blocks.append({"block": number, "usage": view.usage, "words": [share.word for share in view.words[:5]]})
        return {"blocks": blocks, "matrix": matrix}

    @cached_property
    def examples(self) -> dict[int, list[dict[str, Any]]]:
        """Sentences drawn with their states, by the states they visit; the shortest first."""
        process = process_of(self.model)
        draw = Draw(generator_of(0))
        words_of: list[list[int]] = [[] for _ in range(_EXAMPLES)]
        states_of: list[list[int]] = [[] for _ in range(_EXAMPLES)]
        going = torch.arange(_EXAMPLES)
        state = draw.again(process.start, _EXAMPLES)
        for _ in range(_EXAMPLE_WORDS):
            words = process.emitted.draw(state, draw.uniform(len(state)).to(state.device))
            for text, word, z in zip(going.tolist(), words.tolist(), state.tolist(), strict=True):
                words_of[text].append(word)
                states_of[text].append(z)
            open_ended = words != process.eos
            going, state = going[open_ended.cpu()], state[open_ended]
            if not len(going):
                break
            state = next_states(process, state, draw)
        found: dict[int, list[dict[str, Any]]] = {}
        names = self.model.vocabulary.words
        for ids, states in sorted(zip(words_of, states_of, strict=True), key=lambda pair: len(pair[0])):
            sentence = [names[word] for word in ids]
            for place, z in enumerate(states):
                known = found.setdefault(z, [])
                if len(known) < 5 and len(sentence) > 3:
                    known.append({"words": sentence, "place": place})
        return found


def plain(view: Any) -> dict[str, Any]:
    """Return a view as JSON values: named tuples become objects."""

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(entry) for entry in value]
        return {name: convert(entry) for name, entry in value._asdict().items()} if hasattr(value, "_asdict") else value

    return {field.name: convert(getattr(view, field.name)) for field in dataclasses.fields(view)}

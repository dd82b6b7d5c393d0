"""Views of states, words and blocks for the page and its routes. Input: a model and its run. Output: JSON values.

Example sentences are drawn from the model together with their states, so a sentence listed under a state was generated
by that state.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlhmm.analysis.inspect import Inspector
from vlhmm.analysis.stationary import usage_of
from vlhmm.clustering.brown import merge_classes
from vlhmm.data.user_text import generator_of
from vlhmm.lattice.sampling import Draw
from vlhmm.queries.sample import ancestral
from vlhmm.server.responses import written

_EXAMPLES = 2_000
_EXAMPLE_WORDS = 40
_EXAMPLES_SHOWN = 5
_WORDS_SHOWN = 5  # that a block is shown by
_BLOCKS_AT_ONCE = 64
_PAIRS = 1_000_000  # of blocks, that the model's frequencies are written as for the tree


class Explorer:
    """Views of states, words and blocks. The usage of the states is computed once."""

    def __init__(self, model: Any, run: str | Path | None, memory: int | None = None) -> None:
        self.model, self.run, self.memory = model, run, memory
        self.doing = ""  # what `prepare` is at, for those who wait

    @cached_property
    def inspector(self) -> Inspector:
        return Inspector(self.model, usage_of(self.model, self.run, self.memory, self._note_round))

    def prepare(self) -> None:
        """Compute what every view of states needs, once: their usage, and example sentences."""
        self.doing = "finding how much each state is used"
        self.inspector  # noqa: B018 - a cached property
        self.doing = "drawing example sentences"
        self._drawn  # noqa: B018

    def prepare_map(self) -> None:
        """Compute the map of blocks, once."""
        self.prepare()
        self.doing = "putting the map of blocks in order"
        self.block_map_json  # noqa: B018

    def _note_round(self, number: int, change: float) -> None:
        self.doing = f"finding how much each state is used: round {number}, change {change:.1g} of 1e-6"

    def summary(self, top: int = 20) -> dict[str, Any]:
        return self.inspector.summary(top).to_dict()

    def state(self, state: int, top: int = 10) -> dict[str, Any]:
        """Return a state's words, neighbours, usage and example sentences."""
        return self.inspector.state(state, top).to_dict() | {"examples": self._examples(lambda word, z: z == state)}

    def word(self, word: str, top: int = 10) -> dict[str, Any]:
        """Return the states that emit a word, its neighbours, and example sentences."""
        view = self.inspector.word(word, top).to_dict()
        return view | {"examples": self._examples(lambda each, z: each == view["id"])}

    def block(self, block: int, top: int = 10) -> dict[str, Any]:
        """Return a block's words, states, neighbours, usage and example sentences."""
        view = self.inspector.block(block, top).to_dict()
        states = set(self.model.distributions.states_of_block[block].tolist())
        return view | {"examples": self._examples(lambda word, z: z in states)}

    @cached_property
    def block_map(self) -> dict[str, Any]:
        r"""Return the block-by-block matrix $p(block' | block)$, with blocks in the order of Brown's tree.

        The tree merges, again and again, the two blocks whose union loses the least mutual information of adjacent blocks
        under the model's own frequencies. One pass over the transitions, and $O(M^3)$ for the tree.
        """
        inspector, tables = self.inspector, self.model.distributions
        if not inspector.blocks.partition:
            return {"blocks": [], "matrix": []}
        count = inspector.blocks.num_blocks
        mass = inspector.usage.view(count, -1)
        within = mass / mass.sum(1, keepdim=True).clamp(min=1e-300)
        restart = inspector.restart[tables.states_of_block]
        parts, blocks = [], []
        for first in range(0, count, _BLOCKS_AT_ONCE):
            some = slice(first, min(first + _BLOCKS_AT_ONCE, count))
            moved = tables.forward_step_from(
                torch.arange(some.start, some.stop, device=tables.device), within[some] * (1 - restart[some])
            )
            moved = moved + (within[some] * restart[some]).sum(1, keepdim=True) * inspector.start
            parts.append(moved.view(len(moved), count, -1).sum(2))
        matrix, shares = torch.cat(parts).cpu().numpy(), mass.sum(1).cpu().numpy()
        paths = merge_classes(np.rint(shares[:, None] * matrix * _PAIRS).astype(np.int64)).paths
        order = sorted(range(count), key=paths.__getitem__)
        names, frequency = self.model.vocabulary.words, inspector.frequency
        for number in order:
            words = torch.from_numpy(inspector.blocks.words_of_block(number)).to(frequency.device)
            top = frequency[words].topk(min(_WORDS_SHOWN, len(words))).indices
            shown = [names[i] for i in words[top].tolist()]
            blocks.append({"block": number, "path": paths[number], "usage": float(shares[number]), "words": shown})
        return {"blocks": blocks, "matrix": matrix[order][:, order].round(6).tolist()}

    @cached_property
    def block_map_json(self) -> bytes:
        """Return the map as JSON, serialized once: a matrix of 256 blocks takes 50 ms."""
        return written(self.block_map, large=True)

    def _examples(self, fits: Callable[[int, int], bool]) -> list[dict[str, Any]]:
        """Return the shortest drawn sentences that contain a matching word and state, with their positions."""
        names, found = self.model.vocabulary.words, []
        for words, states in self._drawn:
            places = [place for place, pair in enumerate(zip(words, states, strict=True)) if fits(*pair)]
            if places:
                found.append({"words": [names[word] for word in words], "places": places})
            if len(found) == _EXAMPLES_SHOWN:
                break
        return found

    @cached_property
    def _drawn(self) -> list[tuple[list[int], list[int]]]:
        """Return drawn sentences of more than three words with their states, shortest first."""
        distributions, draw = self.model.distributions, Draw(generator_of(0))
        state = draw.again(distributions.start, _EXAMPLES)
        texts = ancestral(distributions, state, _EXAMPLE_WORDS, draw)
        drawn = [pair for pair in zip(*texts, strict=True) if len(pair[0]) > 3]
        return sorted(drawn, key=lambda pair: len(pair[0]))

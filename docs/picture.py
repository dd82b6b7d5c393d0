"""Draws the README's picture from a trained model: `python docs/picture.py runs/demo docs/picture.png`.

Left: where each block of words leads, block to block, summed over all states by their long-run use. Right: the states
behind one sentence, given all of it.
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import vlhmm

SENTENCE = "the state of the union is strong ."


def block_matrix(model) -> torch.Tensor:
    """(M, M) p(next block | block), blocks in the order of their ids, states weighted by their long-run use."""
    tables = model.tables
    blocks, slots = tables.states_of_group.shape
    every = tables.start.double() @ torch.eye(tables.num_states, dtype=torch.float64)
    usage = every
    for _ in range(20):  # the chain forgets its start within a few words
        usage = tables.advance(usage[None])[0]
    rows = torch.zeros(blocks, blocks, dtype=torch.float64)
    for block in range(blocks):
        weight = usage.view(blocks, slots)[block]
        row = tables.advance_from(torch.tensor([block]), (weight / weight.sum())[None])
        rows[block] = row.view(blocks, slots).sum(1)
    return rows


def label(model, state: int, words: int = 3) -> str:
    """A state by the words it emits most."""
    block = state // model.tables.states_per_block
    slot = state % model.tables.states_per_block
    members = (model.tables.group_of_word == block).nonzero()[:, 0]
    top = model.tables.emission[members, slot].topk(min(words, len(members))).indices
    return f"{state}: " + " ".join(model.vocabulary.words[i] for i in members[top].tolist())


def main(run: str, out: str) -> None:
    model = vlhmm.load(run)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.2), width_ratios=[1, 1.35])
    left.imshow(block_matrix(model).log10().clamp(min=-5), cmap="magma", interpolation="nearest")
    left.set(
        title=f"p(next block | block), {len(model.tables.states_of_group)} blocks",
        xlabel="next block",
        ylabel="block",
    )
    posterior = model.posteriors(SENTENCE)
    states: list[int] = []
    for row, shares in zip(posterior.states, posterior.smoothed, strict=True):
        states += [s for s in row[shares.topk(3).indices].tolist() if s not in states]
    grid = torch.zeros(len(states), len(posterior.words))
    for t, (row, shares) in enumerate(zip(posterior.states, posterior.smoothed, strict=True)):
        for state, share in zip(row.tolist(), shares.tolist(), strict=True):
            if state in states:
                grid[states.index(state), t] = share
    right.imshow(grid, cmap="Blues", aspect="auto", vmin=0, vmax=1)
    right.set_xticks(range(len(posterior.words)), posterior.words)
    right.set_yticks(range(len(states)), [label(model, s) for s in states], fontsize=7)
    right.set_title(f"states behind “{SENTENCE}”, p(state | whole sentence)")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Draw the README's figure from a trained model: `python docs/picture.py runs/demo docs/picture.png`.

Left: the word in a gap, given only the words before it. Middle: the same gap, given both sides. Right: the exact
probability that a phrase occurs within the next n words.
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import vlhmm

BEFORE, AFTER = "we must", "the american people ."
PHRASES = ("the united states", "the american people", "world peace")
TOP, HORIZON = 8, 40


def bars(axes, words, title: str, color: str) -> None:
    """Draw the most probable words, the first one on top."""
    words = [each for each in words if each.word != "<unk>"][:TOP]
    axes.barh([each.word for each in words][::-1], [each.probability for each in words][::-1], color=color)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("probability")
    axes.spines[["top", "right"]].set_visible(False)


def main(run: str, out: str) -> None:
    model = vlhmm.load(run)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6))
    bars(left, model.next_word(BEFORE, TOP + 1), f"given the left side\n{BEFORE} ___", "#9aa5b1")
    position = len(BEFORE.split())
    both = model.word_posterior(f"{BEFORE} <unk> {AFTER}", position).top(TOP + 1)
    bars(middle, both, f"given both sides\n{BEFORE} ___ {AFTER}", "#2f6f9f")
    for phrase in PHRASES:
        length = len(phrase.split())  # it cannot end before
        probabilities = model.phrase_probability(phrase, HORIZON)[length - 1 :]
        right.plot(range(length, HORIZON + 1), probabilities, label=phrase)
    right.set_title("phrase occurs within the next n words", fontsize=10)
    right.set_xlabel("n")
    right.set_yscale("log")
    right.set_ylabel("probability")
    right.legend(frameon=False, fontsize=8)
    right.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])

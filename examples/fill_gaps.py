"""Gaps filled given both sides: samples with their probability, the best fill, marginals.

python examples/fill_gaps.py [RUN]        (default: runs/demo, which `vlhmm demo` makes)
"""

import math
import sys

import vlhmm

model = vlhmm.load(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")

# A sentence of the model's own, with a word and then a stretch of words taken out.
texts = (text.text.split() for text in model.sample(50, max_tokens=12, seed=1))
words = next(text for text in texts if len(text) >= 5)
one = " ".join([*words[:2], "[MASK]", *words[3:]])
some = " ".join([words[0], "[MASK:1-3]", words[-1]])

print("text:", " ".join(words))
best = model.best_fill(one)
print(f"best for {one!r}: {best.fill.text!r} ({best.criterion}, p = {math.exp(best.fill.log_prob):.4f})")

# The messages are computed once and asked several times.
gaps = model.gaps(some)
for fill in gaps.sample(3, seed=1):
    print(f"sample: {fill.text!r}  p = {math.exp(fill.log_prob):.2g}")
(gap,) = gaps.marginals()
for length, probability in gap.lengths.items():
    places = [place.top(1)[0].word for place in gap.words.get(length, [])]
    print(f"{length} words: {probability:.4f}; most probable one by one: {' '.join(places)}")
joint = gaps.best()
print(f"{joint.criterion}: {joint.fill.text!r}, path {joint.path_log_prob:.2f} nats")

"""Texts under hard constraints: every one satisfies them, and their probability is known.

python examples/constrain_texts.py [RUN]        (default: runs/demo, which `vlhmm demo` makes)
"""

import math
import sys

import vlhmm
from vlhmm import length, must_contain, must_not, regex
from vlhmm.queries.sample import constrained

model = vlhmm.load(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")

# Two words that the model likes at the start of a sentence, so that the example fits any model.
starts = [w.word for w in model.next_word("", top_k=6) if w.word not in ("<eos>", "<unk>")]
first, second = starts[:2]

for name, constraint in {
    "contains both": must_contain(first, second),
    "in this order": must_contain(second, first, in_order=True),
    "three to five words, none unknown": length(3, 5) & must_not("<unk>"),
    "a pattern": regex(rf"[\{first} \{second}] .{{1,4}} [^\{first}]"),
    "neither or short": must_not(first, second) | length(0, 2),
}.items():
    texts = constrained(model, "", constraint, max_tokens=8)
    print(f"{name}: p = {math.exp(texts.log_constraint):.3g}")
    for text in texts.draw(2, seed=1):
        print("   ", text.text)

# The same for gaps: the constraint may speak of the whole text, or of the gaps alone.
for fill in model.infill(f"{first} [MASK:2-4]", n=2, constraint=must_contain(first), scope="gaps", seed=1):
    print("gap:", fill.text)

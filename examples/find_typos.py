"""The words of a text that fit least, given both sides, and what would have been expected.

python examples/find_typos.py [RUN]        (default: runs/demo, which `vlhmm demo` makes)
"""

import sys

import vlhmm

model = vlhmm.load(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")

# A sentence of the model's own with two of its words changed places.
texts = (text.text.split() for text in model.sample(50, max_tokens=12, seed=1))
words = next(text for text in texts if len(text) >= 4)
words[1], words[2] = words[2], words[1]
print("text:", " ".join(words))
for surprise in model.surprisal(words, top_k=3)[:3]:
    expected = ", ".join(f"{w.word} {w.probability:.2f}" for w in surprise.expected)
    print(f"word {surprise.position + 1} {surprise.word!r}: {surprise.log_prob:.2f} nats; expected {expected}")

"""The exact distribution of the next word.

python examples/next_word.py [RUN]        (default: runs/demo, which `vlhmm demo` makes)
"""

import sys

import vlhmm

model = vlhmm.load(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")

context: list[str] = []
for _ in range(4):
    distribution = model.next_distribution(context)
    best = ", ".join(f"{w.word} {w.probability:.3f}" for w in distribution.top(5))
    print(f"{' '.join(context) or '(start)'}  ->  {best}   entropy {distribution.entropy:.2f} nats")
    assert abs(distribution.probabilities.sum() - 1) < 1e-4
    context.append(distribution.top(1)[0].word)

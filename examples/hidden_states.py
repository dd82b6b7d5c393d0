"""The states behind a text: best paths, and what is known of each word's state before and after the rest.

python examples/hidden_states.py [RUN]        (default: runs/demo, which `vlhmm demo` makes)
"""

import sys

import vlhmm

model = vlhmm.load(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")

texts = (text.text for text in model.sample(50, max_tokens=10, seed=1))
text = next(text for text in texts if len(text.split()) >= 3)

best, second = model.decode(text, k=2)
print("best path", best.states, f"{best.log_prob:.2f} nats")
print("next best", second.states, f"{second.log_prob:.2f} nats")

known = model.posteriors(text)
for t, word in enumerate(known.words):
    early, late = known.filtered[t].max(), known.smoothed[t].max()
    print(f"{word:>12}  most probable state: {early:.3f} on reaching the word, {late:.3f} after the whole text")

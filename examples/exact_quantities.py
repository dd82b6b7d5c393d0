"""Numbers about a model: what can be exact is, what cannot has its error.

python examples/exact_quantities.py [RUN]        (default: runs/demo, which `vlhmm demo` makes)
"""

import sys

import vlhmm
from vlhmm.queries.information import entropy_rate, kl_on_text, phrase_probability

model = vlhmm.load(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")

rate = entropy_rate(model, num_streams=16, num_tokens=64, seed=1)
print(f"entropy rate {rate.value:.3f} ± {rate.standard_error:.3f} nats per token (estimate)")

words = [w.word for w in model.next_word("", top_k=3) if w.word != "<eos>"]
for n, probability in enumerate(phrase_probability(model, words[0], 5), start=1):
    print(f"p({words[0]!r} within {n} tokens) = {probability:.6f} (exact)")

text = model.sample(1, max_tokens=10, seed=2)[0].text
print(f"KL of the model from itself on {text!r}: {kl_on_text(model, model, text).kl} nats per token (exact)")

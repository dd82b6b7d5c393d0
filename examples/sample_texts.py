"""Texts drawn from the model: exactly, with a prompt, and sharpened (no longer exactly).

python examples/sample_texts.py [RUN]        (default: runs/demo, which `vlhmm demo` makes)
"""

import sys

import vlhmm

model = vlhmm.load(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")

for text in model.sample(3, max_tokens=20, scores=True, seed=1):
    print(f"{text.log_prob:8.2f} nats  {text.text}{'' if text.ended else ' …'}")

prompt = model.next_word("", top_k=1)[0].word
for text in model.sample(2, prompt, max_tokens=20, seed=2):
    print("prompted: ", text.text)

for text in model.sample(2, prompt, max_tokens=20, temperature=0.7, top_k=20, seed=3):
    print("sharpened:", text.text, "" if text.exact else "(not exact)")

"""Rerank sentences by their log-probability, and read a text word by word.

python examples/score_sentences.py [RUN]        (default: runs/demo, which `vlhmm demo` makes)
"""

import sys

import vlhmm

model = vlhmm.load(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")

# A sentence and the same words backwards: the model should know which is which.
sentence = model.sample(1, max_tokens=12, seed=1)[0].text
backwards = " ".join(reversed(sentence.split()))
for candidate in sorted([sentence, backwards], key=model.score, reverse=True):
    print(f"{model.score(candidate):9.3f} nats  {candidate}")

# The same number, a word at a time.
for token in model.token_scores(sentence):
    print(f"{token.log_prob:9.3f}  {token.word}")

# A state is a value: keep it, branch from it, write it down.
state = model.begin()
for word in sentence.split()[:3]:
    state = state.step(word)
branches = {word: state.step(word) for word in ("<eos>", "<unk>")}
print(f"read {state.num_words} words, {state.log_prob:.3f} nats;", state.to_json()[:60], "…")
for word, branch in branches.items():
    print(f"  then {word}: {branch.log_prob - state.log_prob:.3f} nats")

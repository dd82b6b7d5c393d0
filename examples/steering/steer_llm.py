"""A language model led by an HMM: texts that must have some words, with their weights, and inside `generate` itself.

python examples/steering/steer_llm.py RUN LLM        (RUN: made by vlhmm distill; LLM: a folder, a .gguf file or a hub name)
"""

import sys

import numpy as np
import torch
from transformers import LogitsProcessorList

import vlhmm
from vlhmm import steering

run, name = sys.argv[1:3]
hmm, llm = vlhmm.load(run), steering.open_llm(name)
prompt = "Write one short sentence about a dog."
constraint = steering.must_include("park", ["ball", "balls"]) & steering.words(5, 14) & steering.sentence_end()

# One call. Every text meets the constraint and ends within the budget.
texts = steering.generate(llm.model, llm.tokenizer, hmm, prompt, constraint, n=8, temperature=0.8, seed=1)
for text in sorted(texts, key=lambda text: text.nats_per_token):
    print(f"{text.nats_per_token:.2f} nats per token  log weight {text.log_weight:6.1f}  {text.text}")

# exp(log_weight) has the mean p_LLM(constraint), whatever the HMM. The effective number of samples tells how good it is.
weights = np.exp([text.log_weight - max(t.log_weight for t in texts) for text in texts])
print(f"effective number of samples: {weights.sum() ** 2 / (weights**2).sum():.1f} of {len(texts)}")

# Particles: eight sequences per text, resampled where their weights become unequal.
for text in steering.generate(llm.model, llm.tokenizer, hmm, prompt, constraint, n=2, particles=8, temperature=0.8):
    print("particles:", text.text)

# The same inside transformers' own generate.
guide = steering.guide_for(hmm, llm.tokenizer, constraint, max_new_tokens=32, end_ids=llm.end_ids)
ids = torch.tensor([llm.prompt_ids(prompt)])
out = llm.model.generate(
    ids,
    attention_mask=torch.ones_like(ids),
    logits_processor=LogitsProcessorList([steering.HMMLogitsProcessor(guide)]),
    max_new_tokens=guide.max_new_tokens,
    num_beams=4,
    do_sample=False,
)
print("beams:", llm.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

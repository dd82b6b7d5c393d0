"""The model's dense matrices in a file, and back.

python examples/export_matrices.py RUN [OUT.npz]
"""

import sys

import vlhmm
from vlhmm.analysis.export import export, load_export

model = vlhmm.load(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
written = export(model, sys.argv[2] if len(sys.argv) > 2 else "matrices.npz")
print(f"{written.path}: {written.num_bytes:,} bytes")

matrices = load_export(written.path)
words = matrices.vocabulary.encode("the <unk>".split())

# log p of a text by the matrices alone; the <eos> that ends it included.
alpha = matrices.start
for word in [*words, matrices.vocabulary.eos]:
    alpha = alpha * matrices.emission[:, word]
    probability = alpha.sum()
    alpha = alpha @ matrices.transition
print(f"by the matrices {probability:.6g}, by the model {2.718281828459045 ** model.score('the <unk>'):.6g}")

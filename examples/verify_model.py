"""Exactness, shown on a model: the largest deviation of every check.

python examples/verify_model.py [RUN]        (default: runs/demo, which `vlhmm demo` makes)
"""

import sys

import vlhmm
from vlhmm.analysis.verify import verify

checks = verify(vlhmm.load(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"), num_texts=2, seed=1)
for check in checks:
    print(f"{'ok  ' if check.passed else 'FAIL'} {check.deviation:8.1e} of {check.bound:.0e}  {check.name}")
assert all(check.passed for check in checks)

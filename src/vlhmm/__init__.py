"""Very large hidden Markov language models: tens of thousands of states, exact inference, an ordinary machine.

import vlhmm
model = vlhmm.load("runs/mine")
model.perplexity("test.txt")
model.next_word("the president of the", top_k=5)
"""

from typing import Any

from vlhmm.errors import CheckpointError, ConfigError, DataError, QueryError, TrainingError, VlhmmError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Model",
    "QueryError",
    "TrainingError",
    "VlhmmError",
    "load",
]


def __getattr__(name: str) -> Any:
    """`load` and `Model` bring torch in when they are first asked for, not when the package is imported."""
    if name in ("load", "Model"):
        from vlhmm import api

        return getattr(api, name)
    raise AttributeError(f"module 'vlhmm' has no attribute {name!r}")

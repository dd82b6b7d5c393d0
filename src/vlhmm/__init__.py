"""Very large hidden Markov language models: tens of thousands of states, exact inference, on an ordinary machine.

    import vlhmm

    model = vlhmm.train("train.txt", states=2**13)
    model.next_word("the president of the", top_k=5)
    model.infill("we must [MASK:1-3] the people .", n=3)

Everything public is named here. Names load torch when they are first used, not when the package is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from vlhmm.errors import CheckpointError, ConfigError, DataError, QueryError, TrainingError, VlhmmError

if TYPE_CHECKING:
    from vlhmm.api import load, load_any, train
    from vlhmm.constraints.constraint import Constraint, length, must_contain, must_not, regex
    from vlhmm.language_model import HMMLanguageModel
    from vlhmm.mixture import MixtureLanguageModel
    from vlhmm.results import to_frame

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Constraint",
    "DataError",
    "HMMLanguageModel",
    "MixtureLanguageModel",
    "QueryError",
    "TrainingError",
    "VlhmmError",
    "length",
    "load",
    "load_any",
    "must_contain",
    "must_not",
    "regex",
    "to_frame",
    "train",
]

_MODULE_OF = {
    "load": "api",
    "load_any": "api",
    "train": "api",
    "HMMLanguageModel": "language_model",
    "MixtureLanguageModel": "mixture",
    "to_frame": "results",
} | dict.fromkeys(("Constraint", "length", "must_contain", "must_not", "regex"), "constraints.constraint")


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vlhmm' has no attribute {name!r}")
    return getattr(import_module(f"vlhmm.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__

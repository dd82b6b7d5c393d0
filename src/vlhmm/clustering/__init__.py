"""Words to blocks: which states may emit which words, and how words are clustered.

`structure` holds the answer (`Blocks`), `clustering` finds it from a text (`brown`, then `exchange`, both
on the counts of `bigrams`), `assignments` cuts words by frequency, `paths` reads and writes wcluster's files.

Names are imported when they are first used: a model is loaded without the compiler that clustering needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlhmm.clustering.assignments import frequency_blocks
    from vlhmm.clustering.bigrams import average_mutual_information, count_bigrams
    from vlhmm.clustering.blocks import Blocks, allocate_states, share_states
    from vlhmm.clustering.brown import brown_clusters
    from vlhmm.clustering.cluster import ClusteringResult, cluster_words
    from vlhmm.clustering.paths import WordPaths, read_paths, write_paths

__all__ = [
    "Blocks",
    "ClusteringResult",
    "WordPaths",
    "allocate_states",
    "average_mutual_information",
    "brown_clusters",
    "cluster_words",
    "count_bigrams",
    "frequency_blocks",
    "read_paths",
    "share_states",
    "write_paths",
]

_MODULE_OF = {
    "Blocks": "blocks",
    "ClusteringResult": "cluster",
    "WordPaths": "paths",
    "allocate_states": "blocks",
    "average_mutual_information": "bigrams",
    "brown_clusters": "brown",
    "cluster_words": "cluster",
    "count_bigrams": "bigrams",
    "frequency_blocks": "assignments",
    "read_paths": "paths",
    "share_states": "blocks",
    "write_paths": "paths",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

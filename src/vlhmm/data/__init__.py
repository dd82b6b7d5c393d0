"""Text -> integers. `vlhmm.data.batches` (integers -> tensors) is imported separately, as it needs torch."""

from vlhmm.data.corpora import CORPORA, Corpus, corpus_path, load_corpus, load_texts
from vlhmm.data.sotu import tokenize
from vlhmm.data.text import Text, encode, learn, read_lines
from vlhmm.data.vocabulary import EOS, UNK, Vocabulary

__all__ = [
    "CORPORA",
    "EOS",
    "UNK",
    "Corpus",
    "Text",
    "Vocabulary",
    "corpus_path",
    "encode",
    "learn",
    "load_corpus",
    "load_texts",
    "read_lines",
    "tokenize",
]

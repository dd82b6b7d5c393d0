"""Steer a language model with an HMM distilled from it: hard constraints, met within the token budget.

    from vlhmm import steering
    texts = steering.generate(llm, tokenizer, vlhmm.load("runs/smol"), "Write one sentence about a dog.",
                              steering.must_include("park", ["ball", "balls"]) & steering.words(5, 12), n=5)

Needs the extra: pip install 'vlhmm[llm]'.
"""

from vlhmm.steering.checkpoints import read_checkpoint, write_checkpoint
from vlhmm.steering.generation import SteeredText, generate, guide_for
from vlhmm.steering.guide import Guide, GuideState
from vlhmm.steering.hmm import SteeringHMM
from vlhmm.steering.llm import LLM, open_llm
from vlhmm.steering.logits_processor import HMMLogitsProcessor
from vlhmm.steering.text_constraint import (
    TextConstraint,
    anything,
    choice,
    constraint,
    json_schema,
    must_include,
    must_not,
    prefix,
    regex,
    sentence_end,
    suffix,
    words,
)

__all__ = [
    "LLM", "Guide", "GuideState", "HMMLogitsProcessor", "SteeredText", "SteeringHMM", "TextConstraint", "anything",
    "choice", "constraint", "generate", "guide_for", "json_schema", "must_include", "must_not", "open_llm", "prefix",
    "read_checkpoint", "regex", "sentence_end", "suffix", "words", "write_checkpoint",
]  # fmt: skip

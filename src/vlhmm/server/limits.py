"""Limits of one request, and of all of them together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits, with defaults for a small machine."""

    body_bytes: int = 2 << 20
    prompt_tokens: int = 65_536  # of all prompts of one request together
    prompts: int = 256
    max_tokens: int = 1_024
    n: int = 64
    logprobs: int = 100  # alternatives per token
    alternatives: int = 1 << 20  # echoed tokens times alternatives, in one answer
    gap_words: int = 64  # of all gaps of a template, or of a constrained completion
    regex_chars: int = 2_000
    automaton_states: int = 2_000
    memory: int = 1 << 30  # bytes of a query's messages
    seconds: float = 60.0
    concurrent: int = 64
    batch_tokens: int = 16_384  # tokens scored in one pass
    posterior_words: int = 256

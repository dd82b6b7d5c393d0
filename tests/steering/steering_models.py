"""Small random HMMs over tokens, and the conditional distribution by enumeration (imports nothing of the package)."""

import itertools

import numpy as np
import torch

PIECES = [b"a", b"b", b" ", b"ab", b" a", None, None]  # 5 and 6 end a text
EOS = [5, 6]


def random_hmm(num_blocks=2, size=3, seed=0):
    """(start, A, emission (V, K), block of token): tokens alternate between blocks."""
    random = np.random.default_rng(seed)
    states = num_blocks * size
    start, transition = random.dirichlet(np.ones(states)), random.dirichlet(np.ones(states) * 0.5, size=states)
    block = np.arange(len(PIECES)) % num_blocks
    emission = random.random((len(PIECES), size)) ** 2
    for b in range(num_blocks):
        emission[block == b] /= emission[block == b].sum(axis=0)
    return start, transition, emission, block


def dense_emission(emission, block, num_states):
    size = emission.shape[1]
    full = np.zeros((num_states, len(emission)))
    for token, b in enumerate(block):
        full[b * size : (b + 1) * size, token] = emission[token]
    return full


def text_probabilities(hmm, truth, max_tokens, prefix=()):
    """{tokens: p(tokens | prefix)} of every continuation that ends within `max_tokens` and meets `truth` with the prefix."""
    start, transition, emission, block = hmm
    full = dense_emission(emission, block, len(start))

    def probability(tokens):
        alpha = start * full[:, tokens[0]]
        for token in tokens[1:]:
            alpha = (alpha @ transition) * full[:, token]
        return alpha.sum()

    text = [token for token in range(len(PIECES)) if token not in EOS]
    found = {}
    whole = probability(prefix) if prefix else 1.0
    for n in range(max_tokens):
        for body in itertools.product(text, repeat=n):
            if truth(b"".join(PIECES[token] for token in (*prefix, *body)).decode()):
                for eos in EOS:
                    found[(*body, eos)] = probability((*prefix, *body, eos)) / whole
    return found


def steering_hmm(hmm, dtype=torch.float64, **how):
    from vlhmm.steering.hmm import SteeringHMM

    start, transition, emission, block = hmm
    size = emission.shape[1]
    rows = torch.tensor(transition, dtype=dtype)
    return SteeringHMM(
        torch.tensor(start, dtype=dtype),
        torch.tensor(emission, dtype=dtype),
        torch.tensor(block),
        lambda b: rows[b * size : (b + 1) * size],
        **how,
    )

"""The paper's numbers, as it prints them: what every row of ours stands beside. Data, nothing else.

Perplexities count `<eos>` and `<unk>`. The paper evaluates its own models over 16 streams with the state
carried across line ends, after training that resets it there.
"""

from typing import NamedTuple


class Reported(NamedTuple):
    """What the paper says of one model."""

    valid: float | None = None
    test: float | None = None
    parameters: int | None = None
    train: float | None = None
    ms_per_batch: float | None = None  # an evaluation batch on an RTX 2080
    source: str = ""  # whom the paper cites for it; empty: trained by its authors


MERITY, BUYS, MIKOLOV = "Merity et al. 2017", "Buys et al. 2018", "Mikolov and Zweig 2012"

# Table 1: (corpus, model)
MAIN = {
    ("ptb", "kn"): Reported(None, 141.2, 2_000_000, source=MIKOLOV),
    ("ptb", "awd-lstm"): Reported(60.0, 57.3, 24_000_000, source=MERITY),
    ("ptb", "ff"): Reported(159.9, 152.0, 2_900_000),
    ("ptb", "lstm"): Reported(93.6, 88.8, 3_600_000),
    ("ptb", "hmm-rnn"): Reported(142.3, None, 10_000_000, source=BUYS),
    ("ptb", "hmm-900"): Reported(284.6, None, 10_000_000, source=BUYS),
    ("ptb", "vlhmm"): Reported(125.0, 116.0, 11_400_000),
    ("wikitext-2", "kn"): Reported(248.7, 234.3, 5_700_000),
    ("wikitext-2", "awd-lstm"): Reported(68.6, 65.8, 33_000_000, source=MERITY),
    ("wikitext-2", "ff"): Reported(210.9, 195.0, 8_800_000),
    ("wikitext-2", "lstm"): Reported(124.5, 117.5, 9_600_000),
    ("wikitext-2", "vlhmm"): Reported(166.6, 158.2, 17_300_000),
}

# Figure "state size": |Z| -> PTB valid, λ = 0.5, M = 128
STATES = {
    2**10: Reported(213.25),
    2**11: Reported(199.98),
    2**12: Reported(169.18),
    2**13: Reported(150.22),
    2**14: Reported(135.79),
    2**15: Reported(125.02),
    2**16: Reported(121.93),
}

# Table 2 and its repetition in the appendix: 2^14 states on PTB, one thing changed at a time
ABLATIONS = {
    "full": Reported(134, None, 7_200_000, train=115, ms_per_batch=40),
    "scalar": Reported(169, None, 423_000_000, train=119, ms_per_batch=14),
    "no-dropout": Reported(157, None, 7_200_000, train=88, ms_per_batch=100),
    "factored": Reported(136, None, 5_600_000, train=122, ms_per_batch=48),
}

# Table 3, row by row: (constraint, |Z|, k, M), PTB valid; one model stands there twice, with two numbers
CONSTRAINTS = (
    (("brown", 2**14, 512, 32), Reported(137)),
    (("brown", 2**14, 256, 64), Reported(138)),
    (("brown", 2**14, 128, 128), Reported(134)),
    (("brown", 2**14, 64, 256), Reported(136)),
    (("none", 2**10, None, None), Reported(180)),
    (("brown", 2**10, 256, 4), Reported(182)),
    (("brown", 2**10, 128, 8), Reported(194)),
    (("uniform", 2**13, 128, None), Reported(150)),
    (("brown", 2**13, 128, 64), Reported(142)),
    (("uniform", 2**14, 128, None), Reported(146)),
    (("brown", 2**14, 128, 128), Reported(136)),
)

# Figure "factored": M -> PTB valid at 2^14 states
INDEPENDENT = {32: Reported(136.58), 64: Reported(137.55), 128: Reported(134.06), 256: Reported(135.75)}
FACTORED = {32: Reported(142.528), 64: Reported(143.02), 128: Reported(137.415), 256: Reported(137.708)}

# Cost on one RTX 2080, PTB: seconds per epoch
SECONDS_PER_EPOCH = {"ff": 3.0, "lstm": 23.0, "vlhmm": 433.0}

"""What is measured, how large and how long: the full benchmark, the quick one, and one for tests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The full benchmark by default: the sizes that docs/bench.md reports, within 15 minutes on two cores."""

    name: str = "full"
    seconds: float = 840.0  # after this nothing new is begun, and what is under way is ended
    train_tokens: int = 1_000_000  # a longer training text is cut here
    exchange_sweeps: int = 2  # of the Brown clusters: cheap, and the same for every number of blocks
    hidden_size: int = 256  # h
    state_dropout: float = 0.5  # λ
    # training: block-factored by gradient, and the LSTM
    num_states: int = 2**15
    num_blocks: int = 128
    batch_tokens: int = 8_192
    rounds: int = 8
    # the paper's softmax, streamed
    softmax_states: int = 2**15
    softmax_blocks: int = 128
    softmax_rounds: int = 3
    # generalized EM
    em_states: int = 2**15
    em_blocks: int = 128
    em_tokens: int | None = None  # tokens an E-step; none: the whole training text
    em_batch_tokens: int = 65_536
    em_rounds: int = 2
    # scoring
    scoring_states: int = 2**15
    scoring_blocks: int = 128
    scoring_tokens: int = 400_000
    scoring_rounds: int = 2
    scoring_sample: int = 64  # sentences compared with the reference implementation
    # the naive program
    naive_states: tuple[int, ...] = (2**10, 2**11, 2**12, 2**13, 2**14, 2**15)  # as far as it gets
    naive_states_per_block: int = 256
    naive_gb: float = 16.0
    naive_seconds: float = 75.0  # for each of its two variants
    # growth; the first two numbers of states are measured side by side
    growth_pair: tuple[int, int] = (2**15, 2**17)
    growth_states: tuple[int, ...] = (2**12, 2**13, 2**14, 2**16)
    growth_states_per_block: int = 256  # k while |Z| grows
    growth_k: tuple[int, ...] = (64, 128, 512)
    growth_tokens: tuple[int, ...] = (512, 1_024, 2_048, 4_096, 16_384)
    growth_batch_tokens: int = 8_192
    growth_large_batch: int = 32_768  # the pair once more: what a step does to every state is shared by more tokens
    growth_low_rank_batch: int = 131_072  # and with low-rank factors within blocks
    growth_rounds: int = 4


FULL = Sizes()

QUICK = Sizes(
    name="quick",
    seconds=160.0,
    train_tokens=200_000,
    exchange_sweeps=0,
    batch_tokens=4_096,
    rounds=3,
    softmax_states=2**13,
    softmax_rounds=2,
    em_tokens=65_536,
    em_batch_tokens=32_768,
    em_rounds=1,
    scoring_tokens=40_000,
    scoring_rounds=1,
    scoring_sample=16,
    naive_states=(2**9, 2**10, 2**11, 2**12),
    naive_gb=8.0,
    naive_seconds=6.0,
    growth_states=(2**13,),
    growth_k=(128,),
    growth_tokens=(1_024,),
    growth_batch_tokens=4_096,
    growth_large_batch=16_384,
    growth_low_rank_batch=65_536,
    growth_rounds=2,
)

TINY = Sizes(
    name="tiny",
    seconds=120.0,
    train_tokens=3_000,
    exchange_sweeps=0,
    hidden_size=8,
    num_states=64,
    num_blocks=8,
    batch_tokens=256,
    rounds=2,
    softmax_states=64,
    softmax_blocks=8,
    softmax_rounds=1,
    em_states=64,
    em_blocks=8,
    em_tokens=512,
    em_batch_tokens=256,
    em_rounds=1,
    scoring_states=64,
    scoring_blocks=8,
    scoring_tokens=1_000,
    scoring_rounds=1,
    scoring_sample=4,
    naive_states=(16, 32),
    naive_states_per_block=8,
    naive_gb=1.0,
    naive_seconds=10.0,
    growth_pair=(32, 64),
    growth_states=(16,),
    growth_states_per_block=8,
    growth_k=(4,),
    growth_tokens=(128,),
    growth_batch_tokens=256,
    growth_large_batch=512,
    growth_low_rank_batch=1_024,
    growth_rounds=1,
)

SIZES = {sizes.name: sizes for sizes in (FULL, QUICK, TINY)}

"""How a model is trained, and the whole configuration of a run."""

import math
from dataclasses import dataclass, field
from typing import Literal

from vlhmm.components.config import ModelConfig
from vlhmm.errors import ConfigError
from vlhmm.limits import MAX_COUNT, MAX_SECONDS, MAX_SEED, MAX_STATES, check_range, check_ranges

FORMAT_VERSION = 1


# What each number may be, read from a file or given by a user
RANGES: dict[str, tuple[float, float]] = {
    "num_streams": (1, 1 << 20),
    "segment_length": (1, 1 << 20),
    "batch_tokens": (1, MAX_COUNT),
    "em_tokens": (1, 10**12),
    "extra_tokens": (1, 10**12),
    "m_steps": (1, 1_000_000),
    "m_parts": (1, MAX_STATES),
    "guide_weight": (0, 1e6),
    "guide_text": (0, 10**12),
    "smoothing": (0, 1e12),
    "epochs": (0, 1e6),
    "rate": (0, 1e6),
    "weight_decay": (0, 1e6),
    "clip": (0, 1e30),
    "warmup_steps": (0, MAX_COUNT),
    "decay": (0, 1e6),
    "patience": (1, MAX_COUNT),
    "checks_per_epoch": (0, 1e6),
    "seed": (0, MAX_SEED),
    "checkpoint_seconds": (0, MAX_SECONDS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The paper's training by default: streams of 16 x 32 tokens, AdamW at 1e-2, rate / 4 on a plateau."""

    method: Literal["gradient", "em"] = "gradient"  # em: counts of `em_tokens`, then `m_steps` optimizer steps
    context: Literal["reset", "carry", "paper"] = "reset"  # paper: reset, but carried over segment cuts
    state_dropout: float = 0.5  # λ, the share of every block's states that a step leaves out
    embedding_dropout: float = 0.0  # of single coordinates of the states' embeddings
    batch: Literal["streams", "sentences"] = "streams"  # the text in parallel streams, cut in segments; or whole lines
    num_streams: int = 16  # for streams
    segment_length: int = 32  # tokens of each stream a batch
    batch_tokens: int = 8_192  # tokens a batch, for sentence batches
    em_tokens: int | None = None  # em: tokens an E-step; none: the whole training text
    extra_tokens: int | None = None  # em: tokens of an extra text an E-step; none: as many as the training text has
    m_steps: int = 3  # em: optimizer steps an E-step
    m_parts: int = 1  # em: each of them looks at the transitions out of one state in so many, in turn
    guide_weight: float = 0.0  # em: of a teacher's evidence about the states (train --guide)
    guide_full: float = 0.6  # the share of training with all of it ...
    guide_until: float = 0.95  # ... and with some of it
    guide_text: int = 0  # tokens of text that the teacher writes, to be learned from as an extra text is
    unknown_words: Literal["as-is", "held-out"] = "as-is"  # held-out: rare words are read as <unk> at times
    smoothing: float = 0.0  # em, scalar: Dirichlet pseudo-counts toward averages of the block, and of all text
    epochs: float = 50.0  # passes over the training text
    optimizer: Literal["adamw", "closed-form"] = "adamw"  # closed-form: scalar EM only
    rate: float = 1e-2  # of learning, at its highest
    beta2: float = 0.999  # of AdamW
    weight_decay: float = 0.0  # of matrices; biases and norms are left alone
    clip: float = 5.0  # the gradient's norm, at most
    warmup_steps: int = 0  # over which the rate rises
    schedule: Literal["plateau", "cosine", "constant"] = "plateau"  # of the rate
    decay: float = 4.0  # plateau: the rate is divided by this
    patience: int = 8  # plateau: checks without improvement
    checks_per_epoch: float = 4.0  # validations an epoch
    calibrate: bool = False  # at the end: factors on the logits, chosen on the validation text
    average: float = 0.0  # decay of the weights' moving average; 0: none
    seed: int = 0  # of everything drawn
    checkpoint_seconds: float = 60.0  # between two checkpoints

    @property
    def evaluation_context(self) -> Literal["reset", "carry"]:
        """The context rule of the trained model; "paper" is a rule of training, evaluated by "carry" as in the paper."""
        return "carry" if self.context == "paper" else self.context

    def __post_init__(self) -> None:
        positive = (
            "num_streams",
            "segment_length",
            "batch_tokens",
            "m_steps",
            "m_parts",
            "epochs",
            "rate",
            "clip",
        )
        for name in (*positive, "decay", "checks_per_epoch", "patience", "checkpoint_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0, and finite")
        for name in ("weight_decay", "smoothing", "warmup_steps", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more, and finite")
        check_ranges(self, RANGES)
        if not 0 <= self.beta2 < 1:
            raise ConfigError(f"beta2={self.beta2} must lie in [0, 1)")
        if not 0 <= self.state_dropout < 1:
            raise ConfigError(f"state_dropout={self.state_dropout} must lie in [0, 1): 1 would keep no state")
        for name in ("average", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        if self.guide_weight < 0 or not 0 <= self.guide_full <= self.guide_until <= 1:
            raise ConfigError(
                f"guide_weight={self.guide_weight}, guide_full={self.guide_full}, guide_until={self.guide_until}: expected a "
                "weight of 0 or more and 0 <= guide_full <= guide_until <= 1"
            )
        if self.guide_text < 0:
            raise ConfigError(f"guide_text={self.guide_text} must be 0 or more")
        if self.guide_text and not self.guide_weight:
            raise ConfigError(f"guide_text={self.guide_text} is nothing without a guide; set guide_weight above 0")
        by_lines = (self.batch, self.context) == ("sentences", "reset")
        by_streams = (self.batch, self.context) == ("streams", "carry")
        if self.guide_weight and not (self.method == "em" and self.em_tokens is None and (by_lines or by_streams)):
            raise ConfigError(
                "a guide needs training.method=em, no training.em_tokens, and training.batch=sentences with context=reset "
                "or batch=streams with context=carry: its evidence is about the same rows in every E-step"
            )
        if self.guide_text and not by_lines:
            raise ConfigError("guide_text needs training.batch=sentences: a teacher writes line by line")
        if self.guide_weight and self.unknown_words == "held-out":
            raise ConfigError("a guide reads the text as it is: set training.unknown_words=as-is, or leave the guide out")
        if self.em_tokens is not None and self.em_tokens < 1:
            raise ConfigError(f"em_tokens={self.em_tokens} must be at least 1, or none for the whole text")
        if self.extra_tokens is not None and self.extra_tokens < 1:
            raise ConfigError(f"extra_tokens={self.extra_tokens} must be at least 1, or none for as many as there are")
        if self.method == "gradient" and self.optimizer == "closed-form":
            raise ConfigError("optimizer=closed-form belongs to method=em; gradient training takes adamw")
        if self.m_parts > 1 and self.method != "em":
            raise ConfigError(f"m_parts={self.m_parts} belongs to method=em; set it to 1")
        if self.m_parts > 1 and self.optimizer == "closed-form":
            raise ConfigError(f"m_parts={self.m_parts}: optimizer=closed-form takes no optimizer steps; set it to 1")
        if self.optimizer == "closed-form" and self.average:
            raise ConfigError("optimizer=closed-form sets all weights anew in every step; it takes average=0")
        if self.smoothing and self.optimizer != "closed-form":
            raise ConfigError(f"smoothing={self.smoothing} belongs to optimizer=closed-form; set it to 0")
        if self.optimizer == "closed-form" and self.state_dropout:
            raise ConfigError("optimizer=closed-form sets all states at once; it needs state_dropout=0")
        if self.context != "reset" and self.batch == "sentences":
            raise ConfigError(
                f"context={self.context} needs batch=streams: a sentence batch has no state to carry over"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run was made with: `config.json` of its folder."""

    format_version: int = FORMAT_VERSION  # of the run folder; not to be set
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    max_vocab: int | None = None  # as --max-vocab
    min_count: int = 1  # as --min-count

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ConfigError(f"format_version={self.format_version}: this vlhmm writes {FORMAT_VERSION}, and no other")
        check_range("max_vocab", self.max_vocab, 2, MAX_COUNT)
        check_range("min_count", self.min_count, 1, MAX_COUNT)
        if self.training.optimizer == "closed-form" and self.model.parameterization != "scalar":
            raise ConfigError("optimizer=closed-form sets free parameters; it needs model.parameterization=scalar")
        if self.training.m_parts > 1 and self.model.within == "low-rank":
            raise ConfigError(
                f"m_parts={self.training.m_parts}: low-rank transitions have counts of channels, not of states; set it to 1"
            )
        if self.training.embedding_dropout and self.model.parameterization == "scalar":
            raise ConfigError("embedding_dropout needs embeddings; it does not go with model.parameterization=scalar")

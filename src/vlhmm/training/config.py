"""How a model is trained, and the whole configuration of a run."""

from dataclasses import dataclass, field
from typing import Literal

from vlhmm.components.config import ModelConfig
from vlhmm.config import setting
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
    "m_step_updates": (1, 1_000_000),
    "m_step_row_parts": (1, MAX_STATES),
    "smoothing": (0, 1e12),
    "epochs": (0, 1e6),
    "rate": (0, 1e100),
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

    method: Literal["gradient", "em"] = setting(
        "gradient",
        "gradient: one optimizer step per batch; em: expected counts of em_tokens, then m_step_updates optimizer steps.",
        "data of a step",
    )
    context: Literal["reset", "carry", "paper"] = setting(
        "reset",
        "Whether the state is reset at each line (reset), carried over (carry), or reset at lines and carried over segment cuts (paper).",
        "data of a step",
    )
    state_dropout: float = setting(0.5, "Share of every block's states that a step leaves out.", "dropout")
    embedding_dropout: float = setting(
        0.0, "Probability that a coordinate of a state's embedding is dropped.", "dropout"
    )
    batch: Literal["streams", "sentences"] = setting(
        "streams",
        "How the text is cut: parallel streams in segments (streams), or whole lines (sentences).",
        "data of a step",
    )
    num_streams: int = setting(16, "Streams read side by side, with batch=streams.", "data of a step")
    segment_length: int = setting(32, "Tokens of each stream per batch, with batch=streams.", "data of a step")
    batch_tokens: int = setting(8_192, "Tokens per batch, padding included, with batch=sentences.", "data of a step")
    em_tokens: int | None = setting(None, "Tokens per E-step; none for the whole training text.", "EM")
    extra_tokens: int | None = setting(
        None, "Tokens of an extra text per E-step; none for as many as the training text has.", "EM"
    )
    m_step_updates: int = setting(3, "Optimizer steps per E-step.", "EM")
    m_step_row_parts: int = setting(
        1, "With n, each optimizer step of EM reads the transitions out of every n-th state, in turn.", "EM"
    )
    unknown_words: Literal["as-is", "held-out"] = setting(
        "as-is",
        "Whether the text is read as it is (as-is), or rare words are read as <unk> now and then (held-out).",
        "data of a step",
    )
    smoothing: float = setting(
        0.0,
        "Dirichlet pseudo-counts toward the averages of the block and of all text, with optimizer=closed-form.",
        "EM",
    )
    epochs: float = setting(50.0, "Passes over the training text.", "run")
    optimizer: Literal["adamw", "closed-form"] = setting(
        "adamw", "adamw, or closed-form: EM sets free numbers to normalized counts.", "optimizer"
    )
    rate: float = setting(1e-2, "Peak learning rate.", "optimizer")
    beta2: float = setting(0.999, "Decay of AdamW's second moment.", "optimizer")
    weight_decay: float = setting(0.0, "Weight decay of matrices; biases and norms do not decay.", "optimizer")
    clip: float = setting(5.0, "Largest norm of the gradient; longer ones are scaled down.", "optimizer")
    warmup_steps: int = setting(0, "Steps over which the learning rate rises to its peak.", "schedule and validation")
    schedule: Literal["plateau", "cosine", "constant"] = setting(
        "plateau",
        "Learning rate over time: divided when validation stops improving (plateau), a cosine to 0 (cosine), or constant.",
        "schedule and validation",
    )
    decay: float = setting(
        4.0, "What the learning rate is divided by, with schedule=plateau.", "schedule and validation"
    )
    patience: int = setting(
        8,
        "Validations without improvement before the rate is divided, with schedule=plateau.",
        "schedule and validation",
    )
    checks_per_epoch: float = setting(4.0, "Validations per epoch.", "schedule and validation")
    calibrate: bool = setting(
        False,
        "Whether factors on the logits are chosen on the validation text after training.",
        "schedule and validation",
    )
    average: float = setting(
        0.0, "Decay of a moving average of the weights, which is validated and kept; 0 for none.", "optimizer"
    )
    seed: int = setting(0, "Seed of all randomness.", "run")
    checkpoint_seconds: float = setting(60.0, "Seconds between two checkpoints.", "run")

    @property
    def evaluation_context(self) -> Literal["reset", "carry"]:
        """The context rule of the trained model. "paper" is a rule for training only; evaluation then uses "carry", as in the paper."""
        return "carry" if self.context == "paper" else self.context

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        for name in ("epochs", "rate", "clip", "decay", "checks_per_epoch", "checkpoint_seconds"):
            if not getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if not 0 <= self.state_dropout < 1:
            raise ConfigError(f"state_dropout={self.state_dropout} must lie in [0, 1): 1 would keep no state")
        for name in ("beta2", "average", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        if self.method == "gradient" and self.optimizer == "closed-form":
            raise ConfigError("optimizer=closed-form belongs to method=em; gradient training takes adamw")
        if self.m_step_row_parts > 1 and self.method != "em":
            raise ConfigError(f"m_step_row_parts={self.m_step_row_parts} belongs to method=em; set it to 1")
        if self.m_step_row_parts > 1 and self.optimizer == "closed-form":
            raise ConfigError(
                f"m_step_row_parts={self.m_step_row_parts}: optimizer=closed-form takes no optimizer steps; set it to 1"
            )
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
class DistillationConfig:
    """A teacher's part in training by EM (`vlhmm train --guide`, `vlhmm distill --evidence`)."""

    weight: float = setting(
        0.0, "Weight of a teacher's evidence about the states; needs vlhmm train --guide or vlhmm distill --evidence.", "distillation"
    )
    full: float = setting(
        0.6, "Share of training during which the teacher's evidence has its full weight.", "distillation"
    )
    until: float = setting(
        0.95,
        "Share of training after which the teacher's evidence has no weight; it falls linearly in between.",
        "distillation",
    )
    text: int = setting(
        0, "Tokens of text that the teacher writes, which are then read as an extra text.", "distillation"
    )

    def __post_init__(self) -> None:
        check_range("distillation.weight", self.weight, 0, 1e6)
        check_range("distillation.text", self.text, 0, 10**12)
        if not 0 <= self.full <= self.until <= 1:
            raise ConfigError(
                f"distillation.full={self.full}, distillation.until={self.until}: expected 0 <= full <= until <= 1"
            )
        if self.text and not self.weight:
            raise ConfigError(
                f"distillation.text={self.text} has no effect without a teacher; set distillation.weight above 0"
            )

    def weight_at(self, step: int, total_steps: int) -> float:
        """Return the weight of the evidence in a step: full for a share of training, then linearly down to none."""
        left = (self.until - step / total_steps) / max(self.until - self.full, 1e-9)
        return self.weight * min(1.0, max(0.0, left))

    def check_training(self, training: TrainingConfig) -> None:
        """Raise ConfigError where a teacher cannot take part in such training."""
        if not self.weight:
            return
        by_lines = (training.batch, training.context) == ("sentences", "reset")
        by_streams = (training.batch, training.context, training.em_tokens) == ("streams", "carry", None)
        if not (training.method == "em" and (by_lines or by_streams)):
            raise ConfigError(
                "a guide needs training.method=em, and training.batch=sentences with context=reset "
                "or batch=streams with context=carry and without training.em_tokens: it reads whole lines, or the whole text"
            )
        if self.text and not by_lines:
            raise ConfigError("distillation.text needs training.batch=sentences: a teacher writes line by line")
        if training.unknown_words == "held-out":
            raise ConfigError(
                "a guide reads the text as it is: set training.unknown_words=as-is, or leave the guide out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run was made with: `config.json` of its folder."""

    format_version: int = setting(FORMAT_VERSION, "Version of the run folder's format; not to be set.", "run")
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    max_vocab: int | None = setting(
        None, "Number of most frequent words to keep, as --max-vocab; none for all.", "vocabulary"
    )
    min_count: int = setting(1, "How often a word must occur to be kept, as --min-count.", "vocabulary")

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ConfigError(f"format_version={self.format_version}: this vlhmm writes {FORMAT_VERSION}, and no other")
        check_range("max_vocab", self.max_vocab, 2, MAX_COUNT)
        check_range("min_count", self.min_count, 1, MAX_COUNT)
        self.distillation.check_training(self.training)
        if self.training.optimizer == "closed-form" and self.model.parameterization != "scalar":
            raise ConfigError("optimizer=closed-form sets free parameters; it needs model.parameterization=scalar")
        if self.training.m_step_row_parts > 1 and self.model.within == "low-rank":
            raise ConfigError(
                f"m_step_row_parts={self.training.m_step_row_parts}: low-rank transitions have counts of channels, not of states; set it to 1"
            )
        if self.training.embedding_dropout and self.model.parameterization == "scalar":
            raise ConfigError("embedding_dropout needs embeddings; it does not go with model.parameterization=scalar")

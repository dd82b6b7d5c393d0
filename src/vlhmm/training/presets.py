"""Complete configurations by name. An ablation is a preset with single settings changed (`--set`).

The first line of a preset's docstring is its description in `vlhmm train --help`. The presets named after a corpus are
here because every record in `results/` names the `vlhmm train --preset ...` command that repeats it.
"""

from collections.abc import Callable
from dataclasses import replace

from vlhmm.components.config import ModelConfig, Network
from vlhmm.config import unknown
from vlhmm.training.config import RunConfig, TrainingConfig


def em(num_states: int, num_blocks: int, epochs: float, network: Network = "residual", **training: object) -> RunConfig:
    """Return our model: block-factored transitions, trained by generalized EM under state dropout."""
    model = ModelConfig(
        num_states=num_states,
        num_blocks=num_blocks,
        transition="block-factored",
        embedding="additive",
        network=network,
        source_block_init=8.0,
    )
    settings: dict = dict(
        method="em",
        batch="sentences",
        batch_tokens=65_536,
        m_step_updates=3,
        epochs=epochs,
        rate=1.5e-2,
        beta2=0.99,
        schedule="cosine",
        warmup_steps=10,
        checks_per_epoch=0.1,
        weight_decay=2.0,
        state_dropout=0.5,
        calibrate=True,
    )
    return RunConfig(model=model, training=TrainingConfig(**(settings | training)))


def default() -> RunConfig:
    """states, blocks, dropout and iterations chosen by the size of the text; minutes for a million tokens"""
    return em(2**13, 256, 200)


def tiny() -> RunConfig:
    """64 states; takes seconds; for tests and first trials"""
    config = em(64, 8, 12, checks_per_epoch=0.5, batch_tokens=2048, m_step_updates=2)
    return replace(config, model=replace(config.model, hidden_size=32, tile_width=16))


def demo() -> RunConfig:
    """2^14 states in 256 blocks of uneven size, the model of `vlhmm demo`"""
    # half of the text and of the transitions' rows per step: more steps, with new dropout masks, in the same time
    half = em(2**14, 256, 55, em_tokens=925_000, m_step_row_parts=2, checks_per_epoch=0.2, calibrate=False, batch_tokens=1 << 18)
    return replace(half, model=replace(half.model, embedding="independent", allocation="tokens"))


def em_ptb() -> RunConfig:
    """2^15 states in 256 blocks on Penn Treebank by generalized EM"""
    return em(2**15, 256, 300, embedding_dropout=0.35)


def em_wikitext_2() -> RunConfig:
    """2^15 states in 256 blocks on WikiText-2 by generalized EM"""
    return em(2**15, 256, 240, embedding_dropout=0.15)


DISTILL_ITERATIONS = 270  # E-steps of `vlhmm distill`, however long the text


def distill() -> RunConfig:
    """2^14 states in 256 blocks, for the samples of a language model (`vlhmm distill`)"""
    config = em(
        2**14, 256, 45, em_tokens=250_000, state_dropout=0.25, embedding_dropout=0.2, checks_per_epoch=0.25
    )
    # equal blocks: a lookahead table pays for the padding of uneven ones
    return replace(config, model=replace(config.model, embedding="independent"))


def paper_ptb() -> RunConfig:
    """the paper's model on Penn Treebank: 2^15 states, one softmax over all of them, 16 streams of 32 tokens"""
    return RunConfig(model=ModelConfig(), training=TrainingConfig())


def paper_wikitext_2() -> RunConfig:
    """the paper's model on WikiText-2: paper-ptb with learning rate 1e-3"""
    config = paper_ptb()
    return replace(config, training=replace(config.training, rate=1e-3))


def paper_ptb_none() -> RunConfig:
    """the paper's model with 2^10 states that emit every word"""
    model = replace(paper_ptb().model, constraint="none", num_blocks=1, num_states=2**10)
    return replace(paper_ptb(), model=model)


PRESETS: dict[str, Callable[[], RunConfig]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        default, tiny, demo, distill, em_ptb, em_wikitext_2, paper_ptb, paper_wikitext_2, paper_ptb_none,
    )
}  # fmt: skip


def preset(name: str) -> RunConfig:
    """Return the configuration of that name. An unknown name raises a ConfigError that suggests the nearest one."""
    if name not in PRESETS:
        raise unknown("preset", name, list(PRESETS))
    return PRESETS[name]()

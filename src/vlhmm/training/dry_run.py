"""What a run would cost, measured by a few real steps that leave nothing behind."""

import resource
import tempfile
import time
from typing import Any

from vlhmm.clustering.blocks import Blocks
from vlhmm.data.corpora import Corpus
from vlhmm.malloc import kept_memory
from vlhmm.products import fast_products
from vlhmm.training.config import RunConfig
from vlhmm.training.distillation import Teacher, distillation_for
from vlhmm.training.make_blocks import make_blocks
from vlhmm.training.run_folder import RunFolder
from vlhmm.training.trainer import Trainer
from vlhmm.training.unknown_words import UnknownWords


@kept_memory()
@fast_products()
def dry_run(
    corpus: Corpus,
    config: RunConfig,
    blocks: Blocks | None,
    device: str,
    memory: int | None,
    teacher: Teacher | None = None,
    seconds: float = 10.0,
) -> dict[str, Any]:
    """Estimate parameters, peak memory and seconds per epoch, from two steps or `seconds` of training."""
    hook = distillation_for(corpus, config, teacher)
    if config.distillation.text:
        corpus = corpus._replace(extra=corpus.train)  # what a teacher writes costs as much to read
    if blocks is None:
        tokens = UnknownWords(corpus.train, corpus.vocabulary, config.training).for_clustering()
        blocks = make_blocks(config.model, tokens, corpus.vocabulary, config.training.seed)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(corpus, config, RunFolder(scratch), blocks, device, memory, hook)
        trainer.train_step(trainer.batches())  # compiles kernels and touches memory: not counted
        began, first = time.perf_counter(), trainer.at.step
        while trainer.at.step == first or trainer.ranks.of_first(time.perf_counter() - began) < seconds / 2:
            trainer.train_step(trainer.batches())
        per_step = (time.perf_counter() - began) / (trainer.at.step - first)
        began = time.perf_counter()
        trainer.validate()
        per_check = time.perf_counter() - began
    checks = trainer.total_steps / trainer.check_every
    total = per_step * trainer.total_steps + per_check * checks
    return {
        "parameters": trainer.num_parameters,
        "num_states": blocks.num_real_states,
        "num_blocks": blocks.num_blocks,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "seconds_per_step": per_step,
        "seconds_per_epoch": total / config.training.epochs,
        "seconds_total": total,
        "epochs": config.training.epochs,
        "steps": trainer.total_steps,
    }

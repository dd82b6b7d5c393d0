"""Distill a language model into an HMM: draw samples to train on, and evaluate on held-out ones.

Samples are stored in shards, `RUN/samples/00000.jsonl` and so on, each written atomically. A shard is a function of the
seed and its number, so an interrupted run continues with the first missing shard and produces the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

import vlhmm.api
from vlhmm.baselines.kneser_ney import estimate
from vlhmm.data.atomic_io import write_atomically
from vlhmm.data.manifest import MODEL_FILES
from vlhmm.data.text import Text
from vlhmm.data.tokenizer import TokenLine, TokenVocabulary, encode_tokens, read_token_lines
from vlhmm.errors import ConfigError, DataError
from vlhmm.evaluation.mixture import component_log_probs, fit_weights, mixture_log_probs
from vlhmm.evaluation.protocol import LanguageModel
from vlhmm.limits import MAX_NEW_TOKENS, check_range
from vlhmm.steering.llm import CachedReader, draw_ids, left_padded
from vlhmm.training.trainer import TrainResult

if TYPE_CHECKING:
    from vlhmm.steering.llm import LLM

Progress = Callable[[int, int], None]
HELD_OUT = 40  # one line in HELD_OUT is validation text, another one test text
REPORT = "distillation.json"
LOGITS_AT_ONCE = 2048  # tokens that the LLM reads at once: 400 MB of logits for a vocabulary of 49,152
_MOST_GOING = 7 / 8  # share of a batch: below it, finished samples are dropped, which copies the cache


# ---- drawing


@dataclass(frozen=True, kw_only=True)
class DrawSettings:
    """The settings that the samples of a shard depend on, together with the shard's number and the language model."""

    temperature: float = 1.0
    max_new_tokens: int = 40
    template: str | None = None  # a text with {prompt}; None: the model's chat template
    batch: int = 256  # samples drawn in parallel, which form one shard
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 1e-6, 1e6)
        check_range("max_new_tokens", self.max_new_tokens, 1, MAX_NEW_TOKENS)
        check_range("batch", self.batch, 1, 100_000)


def read_prompts(path: str | Path) -> list[str]:
    """Read prompts from a text file, one per line, or from JSON lines with `prompt`. Empty lines are skipped."""
    from vlhmm.data.atomic_io import open_bytes
    from vlhmm.data.tokenizer import is_jsonl

    prompts = []
    with open_bytes(path) as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n")
                found = json.loads(line)["prompt"] if is_jsonl(path) and line.strip() else line
            except UnicodeDecodeError:
                raise DataError(f"{path}, line {number}: not UTF-8; convert the prompts to UTF-8") from None
            except (ValueError, KeyError, TypeError):
                raise DataError(f'{path}, line {number}: expected a JSON object with "prompt"') from None
            if found.strip():
                prompts.append(found)
    if not prompts:
        raise DataError(f"{path} has no prompts; expected one per line")
    return prompts


def shard_path(folder: Path, number: int) -> Path:
    """Return the path of a shard."""
    return folder / f"{number:05d}.jsonl"


def draw_samples(
    llm: LLM,
    prompts: Sequence[str],
    folder: str | Path,
    tokens: int,
    settings: DrawSettings,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Draw shards of samples until they contain `tokens` tokens, end-of-text tokens included.

    Args:
        llm: The language model to draw from.
        prompts: The prompts; each sample answers one of them, chosen at random.
        folder: The folder of the shards. Existing shards are kept; they must have been drawn with the same settings.
        tokens: The least number of tokens in all.
        settings: Temperature, length and so on.
        progress: Called with the number of tokens drawn and wanted.
        should_stop: Called after every shard; drawing stops if it returns true.

    Returns:
        The number of tokens in the folder.
    """
    folder = Path(folder)
    _check_same_draw(folder, llm, prompts, settings)
    drawn = 0
    for number in count():
        path = shard_path(folder, number)
        if not path.exists():
            if should_stop():
                return drawn
            records = draw_shard(llm, prompts, number, settings)
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in records).encode())
        drawn += sum(len(line.ids) + line.finished for line in read_token_lines(path, llm.vocabulary))
        if progress is not None:
            progress(min(drawn, tokens), tokens)
        if drawn >= tokens:
            return drawn
    raise AssertionError("unreachable")


def _check_same_draw(folder: Path, llm: LLM, prompts: Sequence[str], settings: DrawSettings) -> None:
    """Store the settings that the samples depend on, or raise a ConfigError if other settings are stored."""
    digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
    described = {**asdict(settings), "prompts": digest, "tokenizer": llm.vocabulary.sha256}
    path = folder / "settings.json"
    if not path.exists():
        write_atomically(path, (json.dumps({"llm": llm.name, **described}, indent=2) + "\n").encode())
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise DataError(f"{path} is damaged; remove {folder} to draw the samples again") from None
    for name, value in described.items():
        if stored.get(name) != value:
            shown = "others" if name in ("prompts", "tokenizer") else f"{name}={stored.get(name)}"
            raise ConfigError(f"{folder} holds samples drawn with {shown}: {name} differs; choose another --out")


def draw_shard(
    llm: LLM, prompts: Sequence[str], number: int, settings: DrawSettings
) -> list[dict[str, str | list[int] | bool]]:
    """Draw one batch of samples from p_T(x | prompt), as records with `prompt`, `ids` and `finished`.

    `ids` excludes the end-of-text token. A sample that reaches `max_new_tokens` is cut off and not `finished`.
    """
    seed = int.from_bytes(hashlib.sha256(f"{settings.seed}/{number}".encode()).digest()[:6], "big")
    generator = np.random.default_rng(seed)
    chosen = generator.integers(len(prompts), size=settings.batch)
    heads = {i: llm.prompt_ids(prompts[i], settings.template) for i in set(chosen.tolist())}
    uniforms = generator.random((settings.batch, settings.max_new_tokens, 2))
    reader = CachedReader(llm, [heads[i] for i in chosen.tolist()])
    written = np.full((settings.batch, settings.max_new_tokens), llm.end_ids[0])
    rows = np.arange(settings.batch)  # the unfinished samples
    for t in range(settings.max_new_tokens):
        logits = reader.logits()[:, : len(llm.vocabulary)].cpu()  # a model may have more logits than ids
        tokens = draw_ids(logits, torch.from_numpy(uniforms[rows, t]), settings.temperature).numpy()
        written[rows, t] = tokens
        going = np.flatnonzero(~np.isin(written[rows, : t + 1], llm.end_ids).any(axis=1))
        if not len(going):
            break
        if len(going) <= _MOST_GOING * len(rows):
            reader.select(going)
            rows, tokens = rows[going], tokens[going]
        reader.read(torch.from_numpy(tokens))
    records: list[dict[str, str | list[int] | bool]] = []
    for i, row in zip(chosen.tolist(), written.tolist(), strict=True):
        end = next((place for place, token in enumerate(row) if token in llm.end_ids), None)
        records.append({"prompt": prompts[i], "ids": row[:end], "finished": end is not None})
    return records


# ---- samples as a corpus


class Samples(NamedTuple):
    """Encoded samples, divided into training, validation and test text."""

    train: Text
    valid: Text
    test: Text
    train_lines: list[TokenLine]
    test_lines: list[TokenLine]

    @property
    def num_tokens(self) -> int:
        return self.train.num_tokens + self.valid.num_tokens + self.test.num_tokens


def read_samples(paths: Iterable[str | Path], vocabulary: TokenVocabulary) -> Samples:
    """Read texts or ids from files or folders of shards. One line in 40 is validation text, another test text."""
    train: list[TokenLine] = []
    valid: list[TokenLine] = []
    test: list[TokenLine] = []
    for number, line in enumerate(_lines_of(paths, vocabulary)):
        part = {HELD_OUT - 1: test, HELD_OUT // 2 - 1: valid}.get(number % HELD_OUT, train)
        if line.ids or line.finished:
            part.append(line)
    if not test:
        raise DataError(f"there are {len(train) + len(valid)} samples, expected at least {HELD_OUT}; draw more")
    texts = [encode_tokens(lines, vocabulary) for lines in (train, valid, test)]
    return Samples(texts[0], texts[1], texts[2], train, test)


def _lines_of(paths: Iterable[str | Path], vocabulary: TokenVocabulary) -> Iterator[TokenLine]:
    for path in map(Path, paths):
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise DataError(f"{path} holds no .jsonl files of samples")
        for file in files:
            yield from read_token_lines(file, vocabulary)


# ---- the language model's own probabilities


def llm_log_probs(
    llm: LLM,
    lines: Sequence[TokenLine],
    temperature: float = 1.0,
    template: str | None = None,
    batch: int = 32,
    progress: Progress | None = None,
) -> np.ndarray:
    """Return log p_T(x_t | prompt, x_<t) of every token of the samples, end-of-text tokens included, in order.

    A sample may end with any of the model's end-of-text ids: the probability of its end is their sum. Samples of similar
    length are read together, at most `batch` of them, and fewer where their logits would take too much memory.
    """
    result: dict[int, np.ndarray] = {}
    bodies = [tokens_of(line, llm.end_ids[0]) for line in lines]
    for some in batches_to_read([len(body) for body in bodies], batch):
        heads = [llm.prompt_ids(lines[i].prompt or "", template) for i in some]
        ids, mask = left_padded([head + bodies[i] for head, i in zip(heads, some, strict=True)], llm.end_ids[0])
        longest = max(len(bodies[i]) for i in some)
        with torch.inference_mode():
            logits = llm.model(
                input_ids=ids.to(llm.model.device),
                attention_mask=mask.to(llm.model.device),
                logits_to_keep=longest + 1,
            ).logits
            for row, i in enumerate(some):  # one sample's table of tokens by vocabulary at a time
                scores = logits[row, longest - len(bodies[i]) : longest].float() / temperature
                chosen = scores.gather(1, torch.tensor(bodies[i], device=scores.device)[:, None])[:, 0]
                if lines[i].finished:
                    chosen[-1] = scores[-1, list(llm.end_ids)].logsumexp(-1)
                result[i] = (chosen - scores.logsumexp(-1)).double().cpu().numpy()
            del logits  # before the next ones are made
        if progress is not None:
            progress(len(result), len(lines))
    return np.concatenate([result[i] for i in range(len(lines))])


def tokens_of(line: TokenLine, eos: int) -> list[int]:
    """Return a sample's tokens, its end included."""
    return [*line.ids, *([eos] if line.finished else [])]


def batches_to_read(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the indices in batches of at most `most` and, if there are several, LOGITS_AT_ONCE tokens.

    The longest come first: the memory of a batch then has room for the next one.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or len(batches[-1]) == most or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > LOGITS_AT_ONCE:
            batches.append([])
        batches[-1].append(i)
    return batches


# ---- the report


@dataclass(frozen=True, kw_only=True)
class DistillationReport:
    """How well an HMM predicts held-out samples, compared with its teacher and Kneser-Ney, in nats per token."""

    num_states: int
    num_blocks: int
    vocabulary_size: int
    samples_tokens: int  # of all samples
    train_tokens: int  # of the training text
    test_tokens: int  # of the test text, on which the values below are measured
    hmm_nats: float
    kn_nats: float  # Kneser-Ney, 5-gram, on the same text
    mixture_nats: float  # of HMM and Kneser-Ney, weights by EM on the validation text
    mixture_weight: float  # of the HMM
    llm_nats: float | None  # of the language model, which sees the prompt; None without the model
    temperature: float | None  # of the samples, and of llm_nats
    hmm_mb: float  # size of the model files, 10^6 bytes
    train_minutes: float
    finished: bool  # whether training was completed

    def write(self, folder: str | Path) -> None:
        """Write the report to the run folder."""
        write_atomically(Path(folder) / REPORT, (json.dumps(asdict(self), indent=2) + "\n").encode())


def size_of_model(folder: str | Path) -> int:
    """Return the size in bytes of the model files of a run folder."""
    return sum(path.stat().st_size for name in MODEL_FILES if (path := Path(folder) / name).exists())


def report_on(
    run: str | Path,
    samples: Samples,
    result: TrainResult,
    llm_nats: float | None = None,
    temperature: float | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> DistillationReport:
    """Evaluate the HMM of a run, Kneser-Ney and their mixture on the test samples, and write the report."""
    model = vlhmm.api.load(run, memory=memory)
    kneser_ney = estimate(samples.train, model.vocabulary, 5)
    models: list[LanguageModel] = [model, kneser_ney]
    weights = fit_weights(component_log_probs(models, samples.valid, "reset")).weights
    log_probs = component_log_probs(models, samples.test, "reset", progress=progress)
    report = DistillationReport(
        num_states=model.distributions.blocks.num_real_states,
        num_blocks=model.distributions.num_blocks,
        vocabulary_size=len(model.vocabulary),
        samples_tokens=samples.num_tokens,
        train_tokens=samples.train.num_tokens,
        test_tokens=samples.test.num_tokens,
        hmm_nats=-float(log_probs[0].mean()),
        kn_nats=-float(log_probs[1].mean()),
        mixture_nats=-float(mixture_log_probs(log_probs, weights).mean()),
        mixture_weight=float(weights[0]),
        llm_nats=llm_nats,
        temperature=temperature,
        hmm_mb=size_of_model(run) / 1e6,
        train_minutes=result.seconds / 60,
        finished=result.finished,
    )
    report.write(run)
    return report

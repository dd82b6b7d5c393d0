"""Generate texts of a language model that satisfy a constraint, with importance weights.

    q(x_t | x_<t) = p_LLM(x_t | x_<t) [p_HMM(C | x_<=t) / p_HMM(C | x_<t)]^weight / Z_t
    log weight of a text = sum_t log p_LLM(x_t | x_<t) - log q(x_t | x_<t)

Input:  a model and a tokenizer of `transformers`, an HMM over the same tokens, prompts, a constraint.
Output: `SteeredText`, one or more per prompt. Averages weighted by exp(log_weight) estimate averages under the language
        model conditioned on the constraint, for any HMM. The better the HMM, the more equal the weights.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from torch import Tensor

from vlhmm.data.tokenizer import TokenVocabulary
from vlhmm.errors import ConfigError, QueryError
from vlhmm.language_model import HMMLanguageModel
from vlhmm.limits import MAX_COUNT, check_range
from vlhmm.steering.guide import Guide
from vlhmm.steering.hmm import DEFAULT_MEMORY, SteeringHMM
from vlhmm.steering.llm import LLM, CachedReader, draw_ids
from vlhmm.steering.logits_processor import HMMLogitsProcessor, steered_scores
from vlhmm.steering.lookahead import Progress
from vlhmm.steering.text_constraint import TextConstraint
from vlhmm.steering.token_automaton import TokenAutomaton, token_automaton, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_BATCH = 16
_SCORES_AT_ONCE = 8  # float32 numbers per sequence and vocabulary entry that exist at the same time
_hmm_of_model: "weakref.WeakKeyDictionary[HMMLanguageModel, SteeringHMM]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class SteeredText:
    """A text generated under a constraint."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]  # the end token included
    log_prob: float  # log p_LLM(token_ids | prompt) at temperature 1, in nats
    log_weight: float | None  # importance weight for p_LLM(. | C) at the sampling temperature; None for greedy and beam search
    satisfied: bool  # checked on the text itself

    @property
    def nats_per_token(self) -> float:
        """Return -log_prob per token, the end token included."""
        return -self.log_prob / len(self.token_ids)


def guide_for(
    model: HMMLanguageModel | SteeringHMM,
    tokenizer: "PreTrainedTokenizerBase",
    constraint: TextConstraint,
    max_new_tokens: int = 32,
    end_ids: Sequence[int] | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> Guide:
    """Compile a constraint for a tokenizer and compute its lookahead table.

    Automata and tables are cached with the model and reused for equal constraints.

    Args:
        model: An HMM over the tokenizer's ids.
        tokenizer: The tokenizer of the language model.
        constraint: The constraint on the generated text, without the prompt.
        max_new_tokens: The token budget, the end token included.
        end_ids: All ids that end a text; by default the tokenizer's eos_token_id.
        memory: The most bytes for cached transition rows, and again for lookahead tables.
        progress: Called with (level, levels) while the table is computed.

    Returns:
        The guide, for `HMMLogitsProcessor`.

    Raises:
        QueryError: The constraint cannot be met within the budget, or its table is too large.
        ConfigError: The model is over words, or over the ids of another tokenizer.
    """
    hmm = steering_hmm(model, memory)
    pieces = _pieces(model, hmm, tokenizer)
    ends = [int(i) for i in ([tokenizer.eos_token_id] if end_ids is None else end_ids) if i is not None]
    automaton = _automaton(hmm, constraint, pieces, [end for end in ends if end < hmm.vocab_size])
    return Guide(hmm, automaton, max_new_tokens, progress)


def steering_hmm(model: HMMLanguageModel | SteeringHMM, memory: int = DEFAULT_MEMORY) -> SteeringHMM:
    """Return the `SteeringHMM` of a model, built once per model.

    Raises:
        ConfigError: The model is over words.
    """
    if isinstance(model, SteeringHMM):
        return model
    if not isinstance(model.vocabulary, TokenVocabulary):
        where = f"{model.folder} is a model" if model.folder is not None else "this is a model"
        raise ConfigError(
            f"{where} over {len(model.vocabulary):,} words, steering needs one over the language model's tokens; "
            "make one with vlhmm distill, or vlhmm train --tokenizer"
        )
    found = _hmm_of_model.get(model)
    if found is None:
        found = _hmm_of_model[model] = SteeringHMM.from_model(model, memory)
    found.memory = memory
    return found


def _pieces(
    model: HMMLanguageModel | SteeringHMM, hmm: SteeringHMM, tokenizer: "PreTrainedTokenizerBase"
) -> list[bytes | None]:
    """Return the bytes of every token. Raise a ConfigError if the model has another tokenizer."""
    known = hmm.pieces_of.get(tokenizer)
    if known is not None:
        return known
    pieces = token_bytes(cast("TokenizerLike", tokenizer), hmm.vocab_size)
    count = sum(piece is not None for piece in pieces)
    if not isinstance(model, SteeringHMM):
        vocabulary = cast(TokenVocabulary, model.vocabulary)
        own = vocabulary.token_bytes
        differ = sum(bool(a) and bool(b) and a != b for a, b in zip(pieces, own, strict=False))
        if differ or abs(len(tokenizer.get_vocab()) - len(own)) > len(own) // 100:
            raise ConfigError(
                f"the tokenizers do not match: the language model's has {len(tokenizer.get_vocab()):,} tokens, the HMM's "
                f"{len(own):,}, and {differ:,} ids have different bytes; distill the HMM from this language model"
            )
    elif max(tokenizer.get_vocab().values()) >= hmm.vocab_size and count > hmm.vocab_size:
        raise ConfigError(
            f"the tokenizers do not match: the language model's has {count:,} tokens, the HMM "
            f"{hmm.vocab_size:,}; use an HMM that was distilled from this language model"
        )
    hmm.pieces_of[tokenizer] = pieces
    return pieces


def _automaton(
    hmm: SteeringHMM, constraint: TextConstraint, pieces: list[bytes | None], ends: list[int]
) -> TokenAutomaton:
    """Return the constraint as an automaton over tokens, from the model's cache if it was compiled before."""
    digest = hashlib.sha256(repr((sorted(ends), len(pieces))).encode())
    digest.update(constraint.automaton.delta.tobytes())
    digest.update(constraint.automaton.accept.tobytes())
    key = digest.hexdigest()
    if key not in hmm.automata:
        while len(hmm.automata) >= 64:
            hmm.automata.pop(next(iter(hmm.automata)))
        hmm.automata[key] = token_automaton(constraint.automaton, pieces, ends)
    return hmm.automata[key]


def generate(
    llm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    model: HMMLanguageModel | SteeringHMM,
    prompt: str | Sequence[str],
    constraint: TextConstraint,
    *,
    n: int = 1,
    max_new_tokens: int = 32,
    mode: Literal["sample", "greedy", "beam"] = "sample",
    weight: float = 1.0,
    temperature: float = 1.0,
    particles: int = 1,
    num_beams: int = 8,
    seed: int = 0,
    batch: int = DEFAULT_BATCH,
    template: str | None = None,
    read_prompt: bool = False,
    memory: int = DEFAULT_MEMORY,
    table_progress: Progress | None = None,
    progress: Progress | None = None,
) -> list[SteeredText]:
    """Generate texts that satisfy a constraint.

    Args:
        llm: A causal language model of `transformers`.
        tokenizer: Its tokenizer.
        model: An HMM over the same tokens.
        prompt: One prompt, or several.
        constraint: The constraint on the generated text, without the prompt.
        n: Number of texts per prompt. In beam search, the n best.
        max_new_tokens: The token budget, the end token included. Every text ends within it.
        mode: "sample", "greedy", or "beam".
        weight: Exponent of the HMM's probability ratio. Larger values meet the constraint earlier; 0 only masks tokens
            after which the constraint cannot be met in time.
        temperature: Sampling temperature of the language model.
        particles: Sequences per text, resampled in proportion to their weights when these become unequal (sequential
            Monte Carlo). With more particles the texts are closer to the language model conditioned on the constraint.
        num_beams: Beam width of beam search.
        seed: Seed of every random draw.
        batch: Number of sequences generated in parallel.
        template: A text that contains `{prompt}`; by default the chat template, or the prompt alone.
        read_prompt: Whether the HMM reads the prompt. For HMMs trained on whole texts, not on answers.
        memory: The most bytes for cached transition rows, and again for lookahead tables.
        table_progress: Called with (level, levels) while the lookahead table is computed.
        progress: Called with the number of tokens generated and the largest possible number.

    Returns:
        n texts per prompt, in the order of the prompts.

    Raises:
        QueryError: The constraint cannot be met within the budget. Nothing is generated then.
        ConfigError: The tokenizers differ, or the model is over words.
    """
    _check_options(n, mode, weight, temperature, particles, num_beams, batch)
    wrapped = LLM(str(getattr(llm, "name_or_path", "") or "the language model"), llm, tokenizer)
    guide = guide_for(model, tokenizer, constraint, max_new_tokens, wrapped.end_ids, memory, table_progress)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    heads = [wrapped.prompt_ids(text, template) for text in prompts]
    filler = wrapped.end_ids[0]
    _check_memory({"sample": max(particles, min(batch, n * len(prompts))), "greedy": 1, "beam": num_beams}[mode], guide, memory)
    run = _Run(wrapped, guide, weight, temperature, read_prompt, filler)
    found: list[tuple[int, list[int], float, float | None]] = []
    if mode == "beam":
        for i, head in enumerate(heads):
            found += [(i, *result) for result in run.beams(head, n, num_beams)]
            if progress is not None:
                progress(i + 1, len(heads))
    else:
        generator = torch.Generator().manual_seed(seed)
        owners = [i for i in range(len(prompts)) for _ in range(n if mode == "sample" else 1)]
        at_once = max(1, batch // particles)
        for first in range(0, len(owners), at_once):
            some = owners[first : first + at_once]
            tell = _teller(progress, first, len(some), len(owners), max_new_tokens)
            results = run.sample([heads[i] for i in some], particles, mode == "greedy", generator, tell)
            found += [(i, *result) for i, result in zip(some, results, strict=True)]
        if mode == "greedy":
            found = [each for each in found for _ in range(n)]
    pieces = _pieces(model, guide.hmm, tokenizer)
    texts = []
    for i, ids, log_prob, log_weight in found:
        written = b"".join(pieces[token] or b"" for token in ids[:-1])
        ended = bool(ids) and ids[-1] in wrapped.end_ids
        texts.append(
            SteeredText(
                prompt=prompts[i], text=written.decode("utf-8", errors="replace"), token_ids=tuple(ids),
                log_prob=log_prob, log_weight=log_weight, satisfied=ended and constraint.accepts(written),
            )
        )  # fmt: skip
    return texts


def _teller(
    progress: Progress | None, first: int, some: int, every: int, max_new_tokens: int
) -> Callable[[int], None] | None:
    """Return a function that reports the progress of one batch as a share of all sequences."""
    if progress is None:
        return None
    return lambda step: progress(first * max_new_tokens + step * some, every * max_new_tokens)


def _check_options(
    n: int, mode: str, weight: float, temperature: float, particles: int, num_beams: int, batch: int
) -> None:
    for name, value in (("n", n), ("particles", particles), ("num_beams", num_beams), ("batch", batch)):
        check_range(name, value, 1, MAX_COUNT)
    if mode not in ("sample", "greedy", "beam"):
        raise QueryError(f"unknown mode {mode!r}, expected sample, greedy or beam")
    check_range("weight", weight, 0, 1e6)  # scores are float32
    check_range("temperature", temperature, 1e-6, 1e6)
    if mode != "sample" and particles > 1:
        raise QueryError(f"{particles} particles need mode sample, got {mode}")
    if mode == "beam" and n > num_beams:
        raise QueryError(f"n={n} exceeds num_beams={num_beams}; raise num_beams")


def _check_memory(rows: int, guide: Guide, memory: int) -> None:
    """Raise a QueryError if the scores of so many parallel sequences exceed the memory budget."""
    needed = rows * guide.hmm.vocab_size * 4 * _SCORES_AT_ONCE
    if needed > memory:
        raise QueryError(
            f"{rows:,} sequences at once take {needed / 1e9:.1f} GB for the scores of their next tokens, the budget is "
            f"{memory / 1e9:.1f} GB; take fewer particles or beams, a smaller batch, or more memory"
        )


class _Run:
    """The generation loop of a language model under one guide."""

    def __init__(
        self, llm: LLM, guide: Guide, weight: float, temperature: float, read_prompt: bool, filler: int
    ) -> None:
        self.llm, self.guide, self.weight, self.temperature = llm, guide, weight, temperature
        self.read_prompt, self.filler = read_prompt, filler

    def sample(
        self,
        heads: list[list[int]],
        particles: int,
        greedy: bool,
        generator: torch.Generator,
        tell: Callable[[int], None] | None,
    ) -> Iterator[tuple[list[int], float, float | None]]:
        """Yield (tokens, log p_LLM, log weight) for each prompt. One of its particles is drawn by weight at the end."""
        rows = [head for head in heads for _ in range(particles)]
        count, guide = len(rows), self.guide
        state = guide.start([row if self.read_prompt else () for row in rows])
        reader = CachedReader(self.llm, rows)
        written = np.full((count, guide.max_new_tokens), self.filler, dtype=np.int64)
        log_prob, log_weight = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        mean_weight = torch.zeros(len(heads), dtype=torch.float64)  # logs of mean weights at resamplings
        for t in range(guide.max_new_tokens):
            if tell is not None:
                tell(t)
            logits = reader.logits().float().cpu()
            plain = torch.log_softmax(logits, dim=1)
            log_p = plain if self.temperature == 1 else torch.log_softmax(logits / self.temperature, dim=1)
            open_rows = torch.from_numpy(guide.open(state))
            ratios, log_probability = guide.log_ratios(state)
            scores = steered_scores(guide, state, log_p, ratios, self.weight)
            normalizer = scores.logsumexp(dim=1)
            if greedy:
                tokens = scores.argmax(dim=1)
            else:
                uniforms = torch.rand(count, 2, dtype=torch.float64, generator=generator)
                tokens = draw_ids(scores, uniforms)
            tokens = torch.where(open_rows, tokens, self.filler)
            chosen = tokens[:, None]
            log_prob += torch.where(open_rows, plain.gather(1, chosen)[:, 0].double(), 0.0)
            step = log_p.gather(1, chosen)[:, 0].double() - (scores.gather(1, chosen)[:, 0] - normalizer).double()
            log_weight += torch.where(open_rows, step, 0.0)
            written[:, t] = tokens.numpy()
            state = guide.step(state, tokens.numpy())
            still_open = torch.from_numpy(guide.open(state))
            if not bool(still_open.any()):
                break
            if particles > 1:
                potential = log_probability + ratios.gather(1, chosen.clamp(max=ratios.shape[1] - 1))[:, 0]
                potential = self.weight * torch.where(still_open & potential.isfinite(), potential, 0.0)
                order = _resampled(log_weight.view(-1, particles), potential.view(-1, particles), mean_weight, generator)
                if order is not None:
                    state, written = state.select(order), written[order]
                    log_prob = log_prob[torch.from_numpy(order)]
                    reader.select(order)
                    tokens = tokens[torch.from_numpy(order)]
            reader.read(tokens)
        if tell is not None:
            tell(guide.max_new_tokens)
        weights = log_weight.view(-1, particles)
        for i in range(len(heads)):
            pick = 0
            if particles > 1:
                shares = (weights[i] - weights[i].max()).exp()
                pick = int(torch.multinomial(shares, 1, generator=generator))
            row = i * particles + pick
            ids = written[row].tolist()
            ends = [place for place, token in enumerate(ids) if token in self.llm.end_ids]
            ids = ids[: ends[0] + 1] if ends else ids
            total = float(mean_weight[i] + weights[i].logsumexp(0) - np.log(particles))
            yield ids, float(log_prob[row]), None if greedy else total

    def beams(self, head: list[int], n: int, num_beams: int) -> Iterator[tuple[list[int], float, None]]:
        """Yield the n best texts of `transformers`' beam search, with their log-probabilities."""
        processor = HMMLogitsProcessor(self.guide, self.weight, self.read_prompt)
        ids = torch.tensor([head], device=self.llm.model.device)
        with torch.inference_mode():
            out = cast(Callable[..., Tensor], self.llm.model.generate)(
                input_ids=ids, attention_mask=torch.ones_like(ids), logits_processor=[processor], do_sample=False,
                num_beams=num_beams, num_return_sequences=n, max_new_tokens=self.guide.max_new_tokens,
                eos_token_id=list(self.llm.end_ids), pad_token_id=self.filler, length_penalty=0.0,
            )  # fmt: skip
        for row in out[:, len(head) :].tolist():
            ends = [place for place, token in enumerate(row) if token in self.llm.end_ids]
            body = row[: ends[0] + 1] if ends else row
            with torch.inference_mode():
                whole = torch.tensor([head + body], device=self.llm.model.device)
                logits = self.llm.model(input_ids=whole).logits[0, len(head) - 1 : -1].float().cpu()
            logs = torch.log_softmax(logits, dim=1).gather(1, torch.tensor(body)[:, None])
            yield body, float(logs.double().sum()), None


def _resampled(
    log_weight: Tensor, potential: Tensor, mean_weight: Tensor, generator: torch.Generator
) -> np.ndarray | None:
    """Resample the particles of each prompt whose effective number is below one half. None if no prompt resamples.

    The target after t tokens is p_LLM(x_<=t) p_HMM(C | x_<=t)^weight; the second factor is the `potential`. After
    resampling, the particles have equal weights for this target, so the potential is removed from `log_weight` again.
    """
    groups, particles = log_weight.shape
    current = log_weight + potential
    order = np.arange(groups * particles).reshape(groups, particles)
    changed = False
    for i in range(groups):
        share = torch.softmax(current[i], dim=0)
        if float(1 / (share**2).sum()) >= particles / 2:
            continue
        start = torch.rand(1, generator=generator, dtype=torch.float64)
        places = (torch.arange(particles, dtype=torch.float64) + start) / particles
        picks = torch.searchsorted(share.cumsum(0), places).clamp(max=particles - 1)
        mean_weight[i] += current[i].logsumexp(0) - np.log(particles)
        log_weight[i] = -potential[i][picks]
        order[i] = order[i][picks.numpy()]
        changed = True
    return order.reshape(-1) if changed else None


if TYPE_CHECKING:
    from vlhmm.steering.token_automaton import Tokenizer as TokenizerLike

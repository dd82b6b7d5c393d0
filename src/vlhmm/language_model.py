"""The HMM as a language model: a vocabulary, the model's distributions and a context rule.

Scoring batches of token ids follows the `LanguageModel` protocol that the baselines share. Every other method is an
exact question in terms of words. Log-probabilities are natural logarithms (nats) throughout.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vlhmm import inference
from vlhmm.components.chain_inputs import FilterState, last_carry, pair_codes
from vlhmm.config import unknown
from vlhmm.constraints.constraint import Constraint
from vlhmm.data.manifest import MANIFEST, MODEL_FILES, accept_files, check_manifest
from vlhmm.data.tokenizer import TokenVocabulary, encode_file
from vlhmm.data.user_text import DEFAULT_MEMORY as QUERY_MEMORY
from vlhmm.data.user_text import Seed, encode_sentence
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.distributions import HMMDistributions, TileCache
from vlhmm.errors import CheckpointError, ConfigError
from vlhmm.evaluation.perplexity import Report, Rule, evaluate
from vlhmm.inference import Chain, Potentials, log_space, torch_backend
from vlhmm.queries import left_to_right
from vlhmm.queries.decode import Decoding, Posteriors, decode, posteriors
from vlhmm.queries.infill import BestFill, Fill, GapDistribution, Infilling, Scope, prepare
from vlhmm.queries.information import Divergence, Estimate, entropy_rate, kl_on_text, phrase_probability
from vlhmm.queries.next_word import WordDistribution, WordProbability
from vlhmm.queries.prefix import Prefix, begin
from vlhmm.queries.sample import Sample, sample
from vlhmm.queries.score import TokenScore, score, token_scores
from vlhmm.queries.word_posterior import Surprise, surprisal, word_posterior, word_posteriors
from vlhmm.results import html_table

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_MEMORY = 6 << 30  # bytes of transition tiles kept while scoring
Words = str | Sequence[str]  # a text, split at blanks, or its words
Implementation = Literal["numba", "torch", "log-space"]


class TextModel(ABC):
    """What language models of every kind answer in words, given the methods of the `LanguageModel` protocol."""

    vocabulary: Vocabulary
    rule: Rule
    title: str  # of the table in notebooks

    @abstractmethod
    def start(self, batch_size: int) -> Any: ...
    @abstractmethod
    def score_batch(self, tokens: Tensor, lengths: Tensor, carry: Any) -> tuple[Tensor, Any]: ...
    @abstractmethod
    def next_word_probabilities(self, carry: Any) -> Tensor: ...
    @abstractmethod
    def _about(self) -> dict[str, str]: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}(" + ", ".join(f"{name}={value}" for name, value in self._about().items()) + ")"

    def _repr_html_(self) -> str:
        return html_table(self.title, self._about())

    def perplexity(self, path: str | Path, context: Rule | None = None, streams: int = 16) -> Report:
        """Return the perplexity of a text file, one sentence per line, with every count it depends on.

        Args:
            path: A UTF-8 text file; it may be compressed with gzip or zstd.
            context: "reset" or "carry"; by default the rule the model was trained with.
            streams: Parallel streams under "carry".

        Returns:
            exp(-log p / tokens) in `.perplexity`; tokens are the words and one `<eos>` per line.

        Raises:
            DataError: The file is missing, empty or not UTF-8.

        Example:
            >>> model.perplexity(text_file).tokens
            120
        """
        return evaluate(self, encode_file(path, self.vocabulary), context or self.rule, streams)

    def next_word(self, context: Words = "", top_k: int | None = None) -> list[WordProbability]:
        """Return p(x | context) of the most probable words. An HMM takes O(K S) after reading the context.

        Args:
            context: The words before. The distribution includes `<eos>`: the text may end here.
            top_k: How many words; all of them by default.

        Returns:
            Words with their log-probabilities, most probable first.

        Raises:
            QueryError: The context has probability zero.

        Example:
            >>> len(model.next_word("the", top_k=3))
            3
        """
        return self.next_distribution(context).top(top_k)

    def next_distribution(self, context: Words = "") -> WordDistribution:
        """Return p(x | context) of every word, `<eos>` included. An HMM takes O(K S) after reading the context.

        Args:
            context: The words before.

        Returns:
            A distribution over the vocabulary: `d["word"]`, `d.top(5)`, `d.entropy`, `d.probabilities`.

        Raises:
            QueryError: The context has probability zero.

        Example:
            >>> round(float(model.next_distribution("the dog").probabilities.sum()), 6)
            1.0
        """
        return left_to_right.next_distribution(self, context)


class HMMLanguageModel(TextModel):
    """A hidden Markov language model that answers exact queries.

    Made by `vlhmm.load` or `vlhmm.train`. Its probabilities are computed once, from the parameters of the run.

    Args:
        vocabulary: The words; a word beyond it is read as `<unk>`.
        distributions: p(z_1), p(z' | z) and p(x | z).
        rule: The context rule. "reset": each line starts from p(z_1). "carry": the state runs on over line ends.
        memory: Bytes of transition tiles kept while scoring.
    """

    title = "HMM language model"

    def __init__(
        self, vocabulary: Vocabulary, distributions: HMMDistributions, rule: Rule = "reset", memory: int = DEFAULT_MEMORY
    ) -> None:
        self.vocabulary, self.rule = vocabulary, rule
        self.distributions = distributions.under(rule, vocabulary.eos)
        self.folder: Path | None = None  # its folder, if it was loaded from one
        self.cache = TileCache(distributions, memory)
        if len(vocabulary) != distributions.vocab_size:
            raise ConfigError(
                f"the vocabulary has {len(vocabulary):,} words, the model {distributions.vocab_size:,}; they belong to different runs"
            )

    # ---- what it is

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer whose ids the model is over; None for a model over words."""
        return self.vocabulary.tokenizer if isinstance(self.vocabulary, TokenVocabulary) else None

    def _about(self) -> dict[str, str]:
        distributions = self.distributions
        about = {
            "states": f"{distributions.blocks.num_real_states:,}",
            "blocks": f"{distributions.num_blocks:,}",
            "vocabulary": f"{len(self.vocabulary):,}",
            "transitions": type(distributions.transition).__name__,
            "context": self.rule,
        }
        return about | ({"folder": str(self.folder)} if self.folder is not None else {})

    def save(self, path: str | Path) -> Path:
        """Copy the files that make this model into a new folder, from which `vlhmm.load` reads it.

        Args:
            path: A folder that does not exist yet, or is empty.

        Returns:
            The folder.

        Raises:
            ConfigError: The folder is not empty, or the model was not loaded from files.

        Example:
            >>> vlhmm.load(model.save(tmp / "copy")).score("the dog runs .") == model.score("the dog runs .")
            True
        """
        if self.folder is None:
            raise ConfigError(
                "this model was put together in memory, not trained or loaded; there are no files to save"
            )
        target = Path(path)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target} exists and is not an empty folder; choose another path")
        names = [name for name in (*MODEL_FILES, MANIFEST) if (self.folder / name).exists()]
        if "model.safetensors" not in names:
            raise CheckpointError(f"{self.folder} has no model.safetensors any more; load the model again")
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(self.folder / name, target / name)
        if MANIFEST in names:
            check_manifest(target)  # the files may have changed since they were loaded
        else:
            accept_files(target)
        return target

    # ---- the LanguageModel protocol

    def start(self, batch_size: int) -> FilterState:
        """Return the filter state before the first token, for each row of a batch.

        Example:
            >>> model.start(2).block.tolist()
            [-1, -1]
        """
        block = torch.full((batch_size,), -1, dtype=torch.long, device=self.distributions.device)
        alpha = torch.zeros(
            batch_size,
            self.distributions.states_per_block,
            dtype=self.distributions.dtype,
            device=self.distributions.device,
        )
        return FilterState(block, alpha)

    def score_batch(self, tokens: Tensor, lengths: Tensor, carry: FilterState) -> tuple[Float[Tensor, "batch time"], FilterState]:
        """Return log p(x_t | x_<t) in float64, and the filter state after each row. O(T K^2) per row.

        Args:
            tokens: Word ids, one text per row.
            lengths: How many ids of each row belong to the text; the rest is padding.
            carry: The state before each row: `start(batch_size)`, or what the call before returned.

        Returns:
            The log-probabilities, zero beyond `lengths`, and the filter state after each row.

        Raises:
            ConfigError: One step of the batch needs more transition tiles than the memory budget holds.

        Example:
            >>> ids = torch.from_numpy(model.vocabulary.encode("the dog runs .".split())).long()[None]
            >>> log_prob, _ = model.score_batch(ids, torch.tensor([4]), model.start(1))
            >>> abs(float(log_prob.sum()) - model.score("the dog runs .", eos=False)) < 1e-4
            True
        """
        tokens, lengths = tokens.to(self.distributions.device), lengths.to(self.distributions.device)
        chain = self.chain(tokens, lengths, carry)
        if chain is None:  # more tiles than the budget holds: one half of the time at a time
            if tokens.shape[1] == 1:
                raise ConfigError(
                    f"the memory budget holds {self.cache.capacity} transition tiles, but one step of {tokens.shape[0]} "
                    "rows needs more; raise --memory or score fewer rows at once"
                )
            half = tokens.shape[1] // 2
            left, carry = self.score_batch(tokens[:, :half], lengths.clamp(max=half), carry)
            right, carry = self.score_batch(tokens[:, half:], (lengths - half).clamp(min=0), carry)
            return torch.cat([left, right], dim=1), carry
        passed = inference.forward(self.potentials, chain, carry.alpha)
        return passed.log_scale, last_carry(passed.alpha, chain.start_of, lengths, carry)

    def next_word_probabilities(self, carry: FilterState) -> Float[Tensor, "batch word"]:
        """Return p(x | text so far) of every word x, for each row of a batch, in float64. O(K S h) per distinct block.

        Args:
            carry: What `start` or `score_batch` returned.

        Returns:
            One row per row of the batch, one column per word.

        Example:
            >>> model.next_word_probabilities(model.start(2)).sum(1).round(decimals=4).tolist()
            [1.0, 1.0]
        """
        return self.distributions.emit(self.distributions.predict(*carry)).double()

    @cached_property
    def potentials(self) -> Potentials:
        """The tables that inference reads. Tiles are computed when a text needs them."""
        return Potentials(self.distributions.start_of_block, self.distributions.emission, self.cache.tiles)

    def chain(
        self, tokens: Tensor, lengths: Tensor, carry: FilterState, restart: Bool[Tensor, "batch time"] | None = None
    ) -> Chain | None:
        """Return the tokens as rows of tables, or None if their transition tiles exceed the memory budget.

        Args:
            tokens: Word ids.
            lengths: How many of each row are text.
            carry: The filter state before each row.
            restart: Where the chain starts again from p(z_1) within a row; nowhere by default.

        Returns:
            What inference reads.
        """
        blocks = self.distributions.block_of_word
        restart = torch.zeros_like(tokens, dtype=torch.bool) if restart is None else restart
        codes = pair_codes(blocks, self.distributions.num_blocks, tokens, restart, carry.block)
        live = torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]
        edge_of = self.cache.edges(codes, live)
        return None if edge_of is None else Chain(blocks[tokens], tokens, edge_of, lengths)

    # ---- scores

    def score(self, text: Words, eos: bool = True, implementation: Implementation | None = None) -> float:
        """Return log p(text) in nats, summed over every state path. O(T K^2).

        Args:
            text: Words separated by blanks, or a sequence of words. Words beyond the vocabulary are read as `<unk>`.
            eos: Whether the text ends there: the `<eos>` after it is part of the probability.
            implementation: Which recursion computes the score, to compare them. "numba" and "torch" work in the model's
                type, "log-space" is the reference implementation in float64. By default, the filter in float64 that all
                queries share.

        Returns:
            The log-probability; -inf for a text that the model cannot emit.

        Raises:
            ConfigError: The implementation is unknown, or needs more memory than the model's tile cache has.

        Example:
            >>> round(model.score("the dog runs ."), 2) < 0
            True
            >>> abs(model.score("the dog runs .", implementation="log-space") - model.score("the dog runs .")) < 1e-5
            True
        """
        if implementation is None:
            return score(self, text, eos)
        return self._score_by(implementation, encode_sentence(self.vocabulary, text, eos)[1])

    def _score_by(self, implementation: Implementation, ids: Sequence[int]) -> float:
        if not ids:
            return 0.0
        device, carry = self.distributions.device, self.start(1)
        tokens, lengths = torch.tensor([ids], device=device), torch.tensor([len(ids)], device=device)
        restart = torch.tensor([[False, *map(self.distributions.restarts, ids[:-1])]], device=device)
        chain = self.chain(tokens, lengths, carry, restart)
        if chain is None:
            raise ConfigError(
                f"the memory budget holds {self.cache.capacity} transition tiles, fewer than this text needs"
            )
        if implementation == "log-space":
            start, emission, tiles = (table.double().log() for table in self.potentials)
            log_alpha = log_space.forward(*log_space.expand(start, emission, tiles, chain))
            return float(log_space.log_likelihood(log_alpha, lengths))
        if implementation == "numba":
            from vlhmm.inference import numba_backend

            return float(numba_backend.forward(self.potentials, chain, carry.alpha).log_scale.sum())
        if implementation == "torch":
            return float(torch_backend.forward(self.potentials, chain, carry.alpha).log_scale.sum())
        raise unknown("implementation", implementation, list(get_args(Implementation)))

    def token_scores(self, text: Words, eos: bool = True) -> list[TokenScore]:
        """Return log p(x_t | x_<t) of every token. O(T K^2).

        Args:
            text: As for `score`.
            eos: Whether the `<eos>` after the text is scored too.

        Returns:
            One `TokenScore` per token. Their log-probabilities add up to `score(text)`.

        Example:
            >>> [token.word for token in model.token_scores("the dog runs .")]
            ['the', 'dog', 'runs', '.', '<eos>']
        """
        return token_scores(self, text, eos)

    # ---- the next word

    def begin(self) -> Prefix:
        """Return the empty prefix, from which a text can be read word by word.

        Returns:
            An immutable value with `.step(word)`, `.next_word(top_k)`, `.score(word)` and `.log_prob`.

        Example:
            >>> model.begin().step("the").step("dog").num_words
            2
        """
        return begin(self)

    # ---- generation

    def sample(
        self,
        n: int = 1,
        prompt: Words = "",
        *,
        max_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        constraint: Constraint | None = None,
        scope: Scope = "text",
        scores: bool = False,
        seed: Seed = 0,
        memory: int = QUERY_MEMORY,
    ) -> list[Sample]:
        """Draw texts that begin with a prompt.

        Without temperature, top_k and top_p the draws are exact: from p(text | prompt), or, with a constraint, from
        p(text | prompt, constraint, the text ends within max_tokens).

        Args:
            n: How many texts.
            prompt: The words that every text begins with.
            max_tokens: The largest number of words after the prompt.
            temperature: Exponent 1/temperature on the next-word distribution; not exact unless 1.
            top_k: Draw from the k most probable next words only.
            top_p: Draw from the most probable next words with this total probability only.
            constraint: What each text must satisfy, see `vlhmm.constraints`.
            scope: Whether the constraint applies to the whole "text" or only to the drawn words ("gaps").
            scores: Compute the log-probability of each sample given the prompt. With a constraint it is always computed,
                given the prompt, the constraint and an end within `max_tokens` words.
            seed: An integer, or a NumPy or torch generator.
            memory: The most bytes that a constraint's messages may take.

        Returns:
            The samples, each with `.text`, `.words`, `.ended`, `.exact` and `.log_prob`.

        Raises:
            QueryError: The prompt has probability zero, or the constraint cannot be satisfied.

        Example:
            >>> len(model.sample(2, prompt="the", seed=1))
            2
        """
        return sample(
            self, n, prompt, max_tokens, temperature, top_k, top_p, constraint, scope, scores, seed, memory
        )  # fmt: skip

    def gaps(
        self,
        text: Words,
        *,
        constraint: Constraint | None = None,
        scope: Scope = "text",
        eos: bool = True,
        allow_eos: bool = False,
        memory: int = QUERY_MEMORY,
    ) -> Infilling:
        """Compute the messages of a text with gaps once, for several queries on it.

        Args:
            text: Words and gaps: `[MASK]` is one word, `[MASK:2-4]` two to four.
            constraint: What the result must satisfy, see `vlhmm.constraints`.
            scope: Whether the constraint applies to the whole "text" or only to the filled words ("gaps").
            eos: Whether the text ends after its last word.
            allow_eos: Whether a gap may hold an `<eos>`.
            memory: The most bytes that the messages may take.

        Returns:
            An object with the methods `.sample`, `.best`, `.marginals` and `.log_prob`.

        Raises:
            QueryError: There is no gap, the text or the constraint is impossible, or the messages need more memory.

        Example:
            >>> len(model.gaps("the [MASK] runs .").sample(3, seed=1))
            3
        """
        return prepare(self, text, constraint, scope, eos, allow_eos, memory)

    def infill(
        self,
        text: Words,
        n: int = 1,
        *,
        constraint: Constraint | None = None,
        scope: Scope = "text",
        eos: bool = True,
        allow_eos: bool = False,
        seed: Seed = 0,
        memory: int = QUERY_MEMORY,
    ) -> list[Fill]:
        """Draw fills of the gaps from p(fill | all other words, lengths in range, constraint), exactly.

        Args:
            text: Words and gaps: `[MASK]` is one word, `[MASK:2-4]` two to four.
            n: How many fills.
            constraint: What the result must satisfy, see `vlhmm.constraints`.
            scope: Whether the constraint applies to the whole "text" or only to the filled words ("gaps").
            eos: Whether the text ends after its last word.
            allow_eos: Whether a gap may hold an `<eos>`.
            seed: An integer, or a NumPy or torch generator.
            memory: The most bytes that the messages may take.

        Returns:
            Fills with `.text`, `.gaps` and `.log_prob`, the log-probability of the fill given the other words, gap
            lengths in range, the end of the text (if `eos`) and the constraint.

        Raises:
            QueryError: There is no gap, the text or the constraint is impossible, or the messages need more memory.

        Example:
            >>> model.infill("the [MASK:1-2] runs .", n=2, seed=1)[0].text.endswith("runs .")
            True
        """
        return prepare(self, text, constraint, scope, eos, allow_eos, memory).sample(n, seed)

    def best_fill(
        self,
        text: Words,
        *,
        constraint: Constraint | None = None,
        scope: Scope = "text",
        eos: bool = True,
        allow_eos: bool = False,
        memory: int = QUERY_MEMORY,
    ) -> BestFill:
        """Return the most probable word of a single one-word gap, or else the fill on the most probable state path.

        Args:
            text: Words and gaps: `[MASK]` is one word, `[MASK:2-4]` two to four.
            constraint: What the result must satisfy, see `vlhmm.constraints`.
            scope: Whether the constraint applies to the whole "text" or only to the filled words ("gaps").
            eos: Whether the text ends after its last word.
            allow_eos: Whether a gap may hold an `<eos>`.
            memory: The most bytes that the messages may take.

        Returns:
            The fill, with the criterion it maximizes in `.criterion`: "most probable word" or "joint path". The fill on
            the most probable path of words and states need not be the most probable fill. `.fill.log_prob` is summed
            over all paths, `.path_log_prob` is that of the path, both conditioned as in `infill`.

        Raises:
            QueryError: There is no gap, the text or the constraint is impossible, or the messages need more memory.

        Example:
            >>> model.best_fill("the [MASK] runs .").criterion
            'most probable word'
        """
        return prepare(self, text, constraint, scope, eos, allow_eos, memory).best()

    def gap_distributions(
        self,
        text: Words,
        *,
        constraint: Constraint | None = None,
        scope: Scope = "text",
        eos: bool = True,
        allow_eos: bool = False,
        memory: int = QUERY_MEMORY,
    ) -> list[GapDistribution]:
        """Return each gap's distribution of lengths and, given its length, of each of its words.

        Args:
            text: Words and gaps: `[MASK]` is one word, `[MASK:2-4]` two to four.
            constraint: What the result must satisfy, see `vlhmm.constraints`.
            scope: Whether the constraint applies to the whole "text" or only to the filled words ("gaps").
            eos: Whether the text ends after its last word.
            allow_eos: Whether a gap may hold an `<eos>`.
            memory: The most bytes that the messages may take.

        Returns:
            One `GapDistribution` per gap: `.lengths[n]` is p(length = n), `.words[n]` has a distribution per position,
            given length n. Conditioned as in `infill`.

        Raises:
            QueryError: There is no gap, the text or the constraint is impossible, or the messages need more memory.

        Example:
            >>> [round(sum(gap.lengths.values()), 6) for gap in model.gap_distributions("the [MASK:1-2] runs .")]
            [1.0]
        """
        return prepare(self, text, constraint, scope, eos, allow_eos, memory).marginals()

    # ---- words given both sides

    def word_posterior(self, text: Words, position: int, eos: bool = True, allow_eos: bool = False) -> WordDistribution:
        """Return p(x_t | all other words) for one position. One pass over the transitions.

        Args:
            text: The words; the one at `position` is ignored.
            position: 0 is the first word, -1 the last.
            eos: Whether the text ends there.
            allow_eos: Whether `<eos>` is among the alternatives.

        Returns:
            A distribution over the vocabulary.

        Raises:
            QueryError: The position is outside the text, or the other words have probability zero.

        Example:
            >>> round(float(model.word_posterior("the dog runs .", 1).probabilities.sum()), 6)
            1.0
        """
        return word_posterior(self, text, position, eos, allow_eos)

    def word_posteriors(
        self, text: Words, eos: bool = True, allow_eos: bool = False, memory: int = QUERY_MEMORY
    ) -> Iterator[WordDistribution]:
        """Yield `word_posterior` of every position, in order.

        Args:
            text: The words.
            eos: Whether the text ends there.
            allow_eos: Whether `<eos>` is among the alternatives.
            memory: The most bytes that the computation may take.

        Yields:
            A distribution over the vocabulary for each word.

        Raises:
            QueryError: The other words of a position have probability zero, or the text needs more memory.

        Example:
            >>> len(list(model.word_posteriors("the dog runs .")))
            4
        """
        return word_posteriors(self, text, eos, allow_eos, memory)

    def surprisal(self, text: Words, top_k: int = 5, eos: bool = True, before: Prefix | None = None) -> list[Surprise]:
        """Return the words of a text with -log p(word | all other words), least expected first.

        Args:
            text: The words.
            top_k: How many expected words are listed for each.
            eos: Whether the text ends there.
            before: The prefix before the text (see `begin`); empty by default.

        Returns:
            One `Surprise` per word. `<eos>` is not among the alternatives.

        Raises:
            QueryError: The other words of a position have probability zero.

        Example:
            >>> len(model.surprisal("the dog runs ."))
            4
        """
        return surprisal(self, text, top_k, eos, before=before)

    # ---- hidden states

    def decode(
        self,
        text: Words,
        method: Literal["viterbi", "posterior"] = "viterbi",
        k: int = 1,
        eos: bool = True,
        eos_state: Literal["max", "sum"] = "max",
        before: Prefix | None = None,
    ) -> list[Decoding]:
        """Return the k most probable state paths, or the most probable state of each word.

        Args:
            text: The words.
            method: "viterbi": argmax of p(z, x), O(T K^2 k). "posterior": argmax of p(z_t | x) for each t.
            k: How many paths, for "viterbi".
            eos: Whether the text ends there.
            eos_state: "max": a path has a state for the final `<eos>` too. "sum": paths cover the words only, and the
                state of `<eos>` is summed over.
            before: The prefix before the text (see `begin`); empty by default.

        Returns:
            Decodings with `.states`, `.log_prob` (joint, for "viterbi"), `.posteriors` and `.eos_state`.

        Raises:
            QueryError: The text is empty or has probability zero.

        Example:
            >>> len(model.decode("the dog runs .")[0].states)
            4
        """
        return decode(self, text, method, k, eos, eos_state=eos_state, before=before)

    def posteriors(self, text: Words, eos: bool = True, before: Prefix | None = None) -> Posteriors:
        """Return the filter p(z_t | x_<=t) and the smoother p(z_t | x) of every word. O(T K^2).

        Args:
            text: The words.
            eos: Whether the text ends there.
            before: The prefix before the text (see `begin`); empty by default.

        Returns:
            `.states`, the ids that each word may have, and `.filtered` and `.smoothed` over them.

        Raises:
            QueryError: The text is empty or has probability zero.

        Example:
            >>> model.posteriors("the dog runs .").smoothed.sum(1).round(decimals=6).tolist()
            [1.0, 1.0, 1.0, 1.0]
        """
        return posteriors(self, text, eos, before=before)

    # ---- information

    def entropy_rate(self, streams: int = 64, tokens: int = 256, seed: Seed = 0) -> Estimate:
        """Estimate the entropy of the model's own text, in nats per token, with its standard error.

        No closed form is known for an HMM: this averages -log p(x) / n over sampled streams.

        Args:
            streams: Texts drawn, independently of each other.
            tokens: Tokens per stream.
            seed: An integer, or a NumPy or torch generator.

        Returns:
            The estimate in `.value` and its standard error in `.standard_error`.

        Raises:
            QueryError: Fewer than two streams, an empty stream, or more tokens than memory holds.

        Example:
            >>> model.entropy_rate(streams=4, tokens=20).num_streams
            4
        """
        return entropy_rate(self, streams, tokens, seed)

    def phrase_probability(
        self,
        phrase: Words,
        num_words: int,
        context: Words = "",
        allow_eos: bool = True,
        memory: int = QUERY_MEMORY,
    ) -> list[float]:
        """Return p(the phrase occurs within the next n tokens | context) for n = 1 .. num_words, exactly.

        Args:
            phrase: The words.
            num_words: The largest n. One pass over the transitions per token.
            context: The words before.
            allow_eos: Whether the phrase may come after an `<eos>`, which then counts as one of the tokens.
            memory: The most bytes that the messages may take.

        Returns:
            The probabilities, in order of n. They never fall.

        Raises:
            QueryError: A word of the phrase is not in the vocabulary, or the context has probability zero.

        Example:
            >>> p = model.phrase_probability("dog", 5)
            >>> p == sorted(p)
            True
        """
        return phrase_probability(self, phrase, num_words, context, allow_eos, memory)

    def kl_divergence(self, other: "HMMLanguageModel", text: Words) -> Divergence:
        """Return the mean KL divergence of next-word distributions from another model's over the prefixes of a text.

        Args:
            other: A model over the same vocabulary.
            text: The words whose prefixes are the contexts.

        Returns:
            The mean in `.kl`, in nats per token, and the divergence at every token in `.token_kl`.

        Raises:
            QueryError: The vocabularies differ, or a prefix has probability zero.

        Example:
            >>> model.kl_divergence(model, "the dog runs .").kl
            0.0
        """
        return kl_on_text(self, other, text)

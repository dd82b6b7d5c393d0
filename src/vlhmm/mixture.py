"""Mixtures of language models: the queries that a mixture answers exactly, and one clear error for the others."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from vlhmm.constraints.constraint import Constraint
from vlhmm.data.user_text import Seed
from vlhmm.errors import QueryError
from vlhmm.evaluation.mixture import Mixture
from vlhmm.evaluation.perplexity import Rule
from vlhmm.evaluation.protocol import LanguageModel
from vlhmm.language_model import TextModel, Words
from vlhmm.queries import left_to_right
from vlhmm.queries.sample import Sample
from vlhmm.queries.score import TokenScore, total


def _refused(query: str) -> Callable[..., NoReturn]:
    """Return a method that raises the QueryError of a query that needs hidden states."""

    def refuse(self: "MixtureLanguageModel", *args: object, **options: object) -> NoReturn:
        """Raise QueryError: it needs hidden states."""
        self._cannot(query)

    return refuse


class MixtureLanguageModel(Mixture, TextModel):
    """A linear mixture of language models. It answers the queries that need no hidden states, in nats.

    `vlhmm.load_any` makes it from a run of `vlhmm mix`.

    Args:
        components: Language models over one vocabulary.
        weights: One nonnegative weight per component; they are normalized.
        rule: The context rule for reading texts, "reset" or "carry".
        hmm_folders: The folders of its HMMs. Errors name them where only an HMM can answer.

    Example:
        >>> half = vlhmm.MixtureLanguageModel([model, model], [0.5, 0.5])
        >>> abs(half.score("the dog runs .") - model.score("the dog runs .")) < 1e-4
        True
    """

    title = "Mixture of language models"

    def __init__(
        self,
        components: Sequence[LanguageModel],
        weights: Sequence[float],
        rule: Rule = "reset",
        hmm_folders: Sequence[Path] = (),
    ) -> None:
        super().__init__(components, weights, rule)
        self.hmm_folders = tuple(hmm_folders)

    def _about(self) -> dict[str, str]:
        parts = zip(self.weights, self.components, strict=True)
        return {
            "components": " + ".join(f"{weight:.3f} {type(model).__name__}" for weight, model in parts),
            "vocabulary": f"{len(self.vocabulary):,}",
            "context": self.rule,
        }

    def score(self, text: Words, eos: bool = True) -> float:
        """Return log p(text) in nats. It costs what the components' scores cost together.

        Args:
            text: Words separated by blanks, or a sequence of words. Words beyond the vocabulary are read as `<unk>`.
            eos: Whether the text ends there: the `<eos>` after it is part of the probability.

        Returns:
            The log-probability; -inf for a text that no component can emit.

        Example:
            >>> mixture.score("the dog runs .") < 0
            True
        """
        return total(token.log_prob for token in self.token_scores(text, eos))

    def token_scores(self, text: Words, eos: bool = True) -> list[TokenScore]:
        """Return log p(x_t | x_<t) of every token.

        Args:
            text: As for `score`.
            eos: Whether the `<eos>` after the text is scored too.

        Returns:
            One `TokenScore` per token. Their log-probabilities add up to `score(text)`.

        Example:
            >>> [token.word for token in mixture.token_scores("the dog", eos=False)]
            ['the', 'dog']
        """
        return left_to_right.token_scores(self, text, eos)

    def sample(
        self,
        n: int = 1,
        prompt: Words = "",
        max_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        constraint: Constraint | None = None,
        scores: bool = False,
        seed: Seed = 0,
    ) -> list[Sample]:
        """Draw texts that begin with a prompt, word by word.

        Args:
            n: How many texts.
            prompt: The words that every text begins with.
            max_tokens: The largest number of words after the prompt.
            temperature: Exponent 1/temperature on the next-word distribution; not exact unless 1.
            top_k: Draw from the k most probable next words only.
            top_p: Draw from the most probable next words with this total probability only.
            constraint: A mixture takes none: exact constrained samples need hidden states.
            scores: Compute log p(drawn words | prompt) of each.
            seed: An integer, or a NumPy or torch generator.

        Returns:
            The samples, each with `.text`, `.words`, `.ended`, `.exact` and `.log_prob`.

        Raises:
            QueryError: The prompt has probability zero, or there is a constraint.

        Example:
            >>> len(mixture.sample(2, prompt="the", seed=1))
            2
        """
        if constraint is not None:
            self._cannot("constrained samples")
        return left_to_right.sample(self, n, prompt, max_tokens, temperature, top_k, top_p, scores, seed)

    def _cannot(self, what: str) -> NoReturn:
        raise QueryError(left_to_right.without_states(self, "this model", what))

    infill = _refused("infill")
    gaps = _refused("gaps")
    best_fill = _refused("best_fill")
    gap_distributions = _refused("gap_distributions")
    word_posterior = _refused("word_posterior")
    word_posteriors = _refused("word_posteriors")
    surprisal = _refused("surprisal")
    decode = _refused("decode")
    posteriors = _refused("posteriors")
    begin = _refused("begin")

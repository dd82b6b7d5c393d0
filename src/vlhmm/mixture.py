"""A mixture of language models as a user asks it: exact answers where they exist, one clear line where they do not."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vlhmm.data.text import encode, read_lines
from vlhmm.data.user_text import Seed
from vlhmm.errors import QueryError
from vlhmm.evaluation.mixture import Mixture
from vlhmm.evaluation.perplexity import Report, Rule, evaluate
from vlhmm.evaluation.protocol import LanguageModel
from vlhmm.queries import left_to_right
from vlhmm.queries.next_word import WordDistribution, WordProbability
from vlhmm.queries.sample import Sample
from vlhmm.queries.score import TokenScore, total
from vlhmm.results import html_table

Words = str | Sequence[str]  # a text, split at blanks, or its words


class MixtureLanguageModel(Mixture):
    """A linear mixture of language models that answers what needs no hidden states. Nats throughout.

    Made by `vlhmm.load_any` from a run of `vlhmm mix`.

    Args:
        components: Language models over one vocabulary.
        weights: One weight per component, at least zero; they are normalized.
        rule: The context rule by which it reads texts, "reset" or "carry".
        hmm_folders: Where its HMMs lie, to be named where only they can answer.
    """

    def __init__(
        self,
        components: Sequence[LanguageModel],
        weights: Sequence[float],
        rule: Rule = "reset",
        hmm_folders: Sequence[Path] = (),
    ) -> None:
        super().__init__(components, weights, rule)
        self.hmm_folders = tuple(hmm_folders)

    def __repr__(self) -> str:
        return "MixtureLanguageModel(" + ", ".join(f"{name}={value}" for name, value in self._about().items()) + ")"

    def _repr_html_(self) -> str:
        return html_table("Mixture of language models", self._about())

    def _about(self) -> dict[str, str]:
        parts = zip(self.weights, self.components, strict=True)
        return {
            "components": " + ".join(f"{weight:.3f} {type(model).__name__}" for weight, model in parts),
            "vocabulary": f"{len(self.vocabulary):,}",
            "context": self.rule,
        }

    def perplexity(self, path: str | Path, context: Rule | None = None, streams: int = 16) -> Report:
        """Return the perplexity of a text file, one sentence per line, with every count it depends on."""
        return evaluate(self, encode(read_lines(path), self.vocabulary), context or self.rule, streams)

    def score(self, text: Words, eos: bool = True) -> float:
        """Return log p(text), with the <eos> after it by default; -inf if it is impossible."""
        return total(token.log_prob for token in self.token_scores(text, eos))

    def token_scores(self, text: Words, eos: bool = True) -> list[TokenScore]:
        """Return log p(x_t | x_<t) of every token."""
        return left_to_right.token_scores(self, text, eos)

    def next_word(self, context: Words = "", top_k: int | None = None) -> list[WordProbability]:
        """Return the most probable words after `context`, all of them unless `top_k` is given."""
        return self.next_distribution(context).top(top_k)

    def next_distribution(self, context: Words = "") -> WordDistribution:
        """Return p(x | context) of every word."""
        return left_to_right.next_distribution(self, context)

    def sample(
        self,
        n: int = 1,
        prompt: Words = "",
        max_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        constraint: object = None,
        scores: bool = False,
        seed: Seed = 0,
    ) -> list[Sample]:
        """Draw `n` texts that begin with `prompt`, drawn word by word."""
        if constraint is not None:
            self._cannot("constrained samples")
        return left_to_right.sample(self, n, prompt, max_tokens, temperature, top_k, top_p, scores, seed)

    def _cannot(self, what: str) -> NoReturn:
        raise QueryError(left_to_right.without_states(self, "this model", what))

    def infill(self, *args: object, **wishes: object) -> NoReturn:
        """Raise QueryError: it needs hidden states."""
        self._cannot("infill")

    def gaps(self, *args: object, **wishes: object) -> NoReturn:
        """Raise QueryError: it needs hidden states."""
        self._cannot("gaps")

    def best_fill(self, *args: object, **wishes: object) -> NoReturn:
        """Raise QueryError: it needs hidden states."""
        self._cannot("best_fill")

    def gap_distributions(self, *args: object, **wishes: object) -> NoReturn:
        """Raise QueryError: it needs hidden states."""
        self._cannot("gap_distributions")

    def word_posterior(self, *args: object, **wishes: object) -> NoReturn:
        """Raise QueryError: it needs hidden states."""
        self._cannot("word_posterior")

    def word_posteriors(self, *args: object, **wishes: object) -> NoReturn:
        """Raise QueryError: it needs hidden states."""
        self._cannot("word_posteriors")

    def surprisal(self, *args: object, **wishes: object) -> NoReturn:
        """Raise QueryError: it needs hidden states."""
        self._cannot("surprisal")

    def decode(self, *args: object, **wishes: object) -> NoReturn:
        """Raise QueryError: it needs hidden states."""
        self._cannot("decode")

    def posteriors(self, *args: object, **wishes: object) -> NoReturn:
        """Raise QueryError: it needs hidden states."""
        self._cannot("posteriors")

    def begin(self) -> NoReturn:
        """Raise QueryError: the value of a prefix is an HMM's."""
        self._cannot("begin")

"""The queries as methods: what a loaded model can be asked. Nats everywhere."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlhmm.queries.decode import Decoding, Posteriors
    from vlhmm.queries.infill import BestFill, Fill, GapDistribution, Infilling
    from vlhmm.queries.next_word import WordDistribution, WordProbability
    from vlhmm.queries.prefix import State
    from vlhmm.queries.sample import Sample
    from vlhmm.queries.score import TokenScore
    from vlhmm.queries.word_posterior import Surprise

TextLike = str | Sequence[str]


class QueryMethods:
    """Exact questions to a model that has `tables`, `vocabulary` and `rule`; see `docs/queries.md`."""

    def score(self, text: Any, lengths: Any = None, carry: Any = None, eos: bool = True) -> Any:
        """log p(text), with the <eos> after it unless told otherwise; -inf if it is impossible.

        Given a batch of tokens, its lengths and a carry instead, it is the `score` of the `LanguageModel`
        protocol.
        """
        if lengths is not None:
            return super().score(text, lengths, carry)  # type: ignore[misc]
        from vlhmm.queries.score import score

        return score(self, text, eos)

    def token_scores(self, text: TextLike, eos: bool = True) -> "list[TokenScore]":
        """log p(x_t | x_<t) of every token."""
        from vlhmm.queries.score import token_scores

        return token_scores(self, text, eos)

    def begin(self) -> "State":
        """The state before the first word: a value with `.step(word)` and `.next_word(top_k)`."""
        from vlhmm.queries.prefix import begin

        return begin(self)

    def next_word(self, context: TextLike = "", top_k: int | None = None) -> "list[WordProbability]":
        """The most probable words after `context`, all of them unless `top_k` is given."""
        from vlhmm.queries.next_word import next_word

        return next_word(self, context, top_k)

    def next_distribution(self, context: TextLike = "") -> "WordDistribution":
        """p(x | context) of every word."""
        from vlhmm.queries.next_word import next_distribution

        return next_distribution(self, context)

    def sample(self, n: int = 1, prompt: TextLike = "", **wishes: Any) -> "list[Sample]":
        """`n` texts; wishes: max_tokens, temperature, top_k, top_p, constraint, scope, scores, seed,
        memory."""
        from vlhmm.queries.sample import sample

        return sample(self, n, prompt, **wishes)

    def infill(
        self, text: TextLike, n: int = 1, mode: str = "sample", **wishes: Any
    ) -> "list[Fill] | BestFill | list[GapDistribution]":
        """The gaps [MASK], [MASK:a-b] filled given both sides; mode sample, best or marginals.

        Wishes: constraint, scope, eos, allow_eos, seed, memory.
        """
        from vlhmm.queries.infill import infill

        return infill(self, text, n, mode, **wishes)  # type: ignore[arg-type]

    def gaps(self, text: TextLike, **wishes: Any) -> "Infilling":
        """The same with its messages kept, to be asked several times: .sample, .best, .marginals,
        .log_prob."""
        from vlhmm.queries.infill import prepare

        return prepare(self, text, **wishes)

    def word_posterior(
        self, text: TextLike, position: int, eos: bool = True, allow_eos: bool = False
    ) -> "WordDistribution":
        """p(x | all other words) for one place of a text."""
        from vlhmm.queries.word_posterior import word_posterior

        return word_posterior(self, text, position, eos, allow_eos)

    def word_posteriors(self, text: TextLike, **wishes: Any) -> "Iterator[WordDistribution]":
        """The same for every place, in order."""
        from vlhmm.queries.word_posterior import word_posteriors

        return word_posteriors(self, text, **wishes)

    def spot(self, text: TextLike, top_k: int = 5, eos: bool = True) -> "list[Surprise]":
        """The words of a text, the least expected given both sides first."""
        from vlhmm.queries.word_posterior import spot

        return spot(self, text, top_k, eos)

    def decode(self, text: TextLike, method: str = "viterbi", k: int = 1, eos: bool = True) -> "list[Decoding]":
        """The k best state paths, or the most probable state of each word (method "posterior")."""
        from vlhmm.queries.decode import decode

        return decode(self, text, method, k, eos)  # type: ignore[arg-type]

    def posteriors(self, text: TextLike, eos: bool = True) -> "Posteriors":
        """Filtered and smoothed posteriors of every word's state."""
        from vlhmm.queries.decode import posteriors

        return posteriors(self, text, eos)

"""A model for lm-evaluation-harness, without a server.

    python -m vlhmm.server.lm_eval_model --model vlhmm --model_args run=runs/mine --tasks ptb_lines --include_path DIR

takes the arguments of `lm_eval`. Log-likelihoods are those of `/v1/completions`: words are split at blanks, a newline
is an <eos>, and every text is read from a fresh start.
"""

import math
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

import vlhmm
from vlhmm.server.generation import Generation, Wishes, step
from vlhmm.server.scoring import score_texts
from vlhmm.server.tokenizer import tokenizer_of


@register_model("vlhmm")
class VlhmmLM(LM):  # type: ignore[misc]
    """A run of `vlhmm train`, `vlhmm mix` or `vlhmm baseline`."""

    def __init__(self, run: str, memory: int | None = None, batch_texts: int = 64, **unused: Any) -> None:
        super().__init__()
        self.model: Any = vlhmm.load_any(run, memory=memory)
        self.tokenizer = tokenizer_of(self.model.vocabulary)
        self.batch_texts = int(batch_texts)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return log p(continuation | context), and whether every word of it is the most probable one."""
        answers: list[tuple[float, bool]] = []
        for first in range(0, len(requests), self.batch_texts):
            pairs = [request.args for request in requests[first : first + self.batch_texts]]
            contexts = [self._ids(context) for context, _ in pairs]
            texts = [[*given, *self._ids(rest)] for given, (_, rest) in zip(contexts, pairs, strict=True)]
            for given, tokens in zip(contexts, score_texts(self.model, texts, 1), strict=True):
                scored = tokens[len(given) :]
                greedy = all(token.log_prob == token.top[0][1] for token in scored)
                answers.append((math.fsum(token.log_prob for token in scored), greedy))
        return answers

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return log p(text) of whole texts."""
        answers: list[float] = []
        for first in range(0, len(requests), self.batch_texts):
            texts = [self._ids(request.args[0]) for request in requests[first : first + self.batch_texts]]
            scored = score_texts(self.model, texts, 0)
            answers += [math.fsum(token.log_prob for token in tokens) for tokens in scored]
        return answers

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return texts drawn word by word, up to a stop string, an <eos> or `max_gen_toks` words."""
        answers = []
        for request in requests:
            prompt, options = request.args
            until = options.get("until") or []
            wishes = Wishes(
                max_tokens=int(options.get("max_gen_toks", 64)),
                temperature=float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0,
                stop=tuple([until] if isinstance(until, str) else until),
                seed=int(options.get("seed", 0)),
            )
            drawn = Generation(self.model, [self._ids(prompt)], 1, wishes, self.tokenizer)
            drawn.prepare()
            while drawn.open_rows:
                step(self.model, [drawn])
            answers.append(drawn.rows[0].text)
        return answers

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.bare(self.tokenizer.encode(text)))


def main() -> None:
    """Run lm-evaluation-harness with this model among its own."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()

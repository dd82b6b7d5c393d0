"""A logits processor that steers `transformers`' own `generate`.

    scores(v) + weight * [log p(C | x_<t, v) - log p(C | x_<t)]

Input:  a `Guide`.
Output: `HMMLogitsProcessor`, called by `generate` with the sequences so far and the scores of the next token.
"""

import numpy as np
import torch
from torch import Tensor

from vlhmm.limits import check_range
from vlhmm.steering.guide import Guide, GuideState


class HMMLogitsProcessor:
    """Steer `transformers.generate` so that every text satisfies a constraint within the token budget.

    Supports sampling, greedy and beam search, and batches of left-padded prompts. Sequences may be reordered between
    calls: each is recognized by its tokens. One processor can serve several calls of `generate` in turn.

    Args:
        guide: The constraint, the HMM and the budget, see `vlhmm.steering.guide_for`. Pass its `max_new_tokens` to
            `generate` as well: with a smaller number texts are cut off before they end.
        weight: Exponent of the HMM's probability ratio. 1 is exact conditioning if the HMM equals the language model; 0
            only masks tokens after which the constraint cannot be met in time.
        read_prompt: Whether the HMM reads the prompt before the text. Only for HMMs trained on whole texts, not answers.
        pad_token_id: The id of padding before a prompt; needed with read_prompt and padded batches.

    Example:
        processor = HMMLogitsProcessor(guide)
        llm.generate(**inputs, logits_processor=LogitsProcessorList([processor]), max_new_tokens=guide.max_new_tokens)
    """

    def __init__(
        self, guide: Guide, weight: float = 1.0, read_prompt: bool = False, pad_token_id: int | None = None
    ) -> None:
        check_range("weight", weight, 0, 1e6)
        self.guide, self.weight = guide, weight
        self.read_prompt, self.pad_token_id = read_prompt, pad_token_id
        self.reset()

    def reset(self) -> None:
        """Forget the sequences so far, so that the next call begins new texts. `generate` does not need it."""
        self._state: GuideState | None = None
        self._row_of: dict[bytes, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the steered scores, (n, V'). Tokens beyond the vocabulary of the HMM or its tokenizer get -inf."""
        ids = np.ascontiguousarray(input_ids.detach().cpu().numpy().astype(np.int64))
        state = self._continued(ids)
        if state is None:
            state = self.guide.start([self._context(row) for row in ids])
        self._state = state
        self._row_of = {row.tobytes(): i for i, row in enumerate(ids)}
        ratios, _ = self.guide.log_ratios(state)
        return steered_scores(self.guide, state, scores, ratios, self.weight)

    def _continued(self, ids: np.ndarray) -> GuideState | None:
        """Return the state of the sequences if each extends one of the last call by one token, else None."""
        if self._state is None or self._state.remaining < 1:
            return None
        parents = [self._row_of.get(row[:-1].tobytes(), -1) for row in ids]
        if min(parents) < 0:
            return None
        return self.guide.step(self._state.select(parents), ids[:, -1])

    def _context(self, row: np.ndarray) -> list[int]:
        if not self.read_prompt:
            return []
        tokens = row.tolist()
        first = 0
        while self.pad_token_id is not None and first < len(tokens) and tokens[first] == self.pad_token_id:
            first += 1
        return tokens[first:]


def steered_scores(guide: Guide, state: GuideState, scores: Tensor, ratios: Tensor, weight: float) -> Tensor:
    """Add the weighted log-ratios to the scores (n, V') of open sequences. The scores of others do not change."""
    if weight != 1:  # 0 * -inf is NaN
        ratios = torch.where(ratios == -torch.inf, ratios, weight * ratios)
    ratios = ratios.to(device=scores.device, dtype=scores.dtype)
    vocab = guide.hmm.vocab_size
    width = min(vocab, scores.shape[1])
    if scores.shape[1] == width:
        return scores + ratios[:, :width]
    steered = torch.full_like(scores, -torch.inf)
    torch.add(scores[:, :width], ratios[:, :width], out=steered[:, :width])
    ended = torch.from_numpy(~guide.open(state)).to(scores.device)
    if bool(ended.any()):
        steered[ended] = scores[ended]
    return steered

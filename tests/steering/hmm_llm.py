"""A causal language model of `transformers` that is an HMM: steering it with the same HMM is exact conditioning."""

import numpy as np
import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from steering.steering_models import PIECES, dense_emission

PAD = 7  # an id beyond the HMM's vocabulary; logits are one wider than that


class ToyConfig(PretrainedConfig):
    model_type = "toy-hmm"


class ToyLLM(PreTrainedModel, GenerationMixin):
    """log p(x_t | x_<t) of an HMM, computed from the whole text at every step; no cache."""

    config_class = ToyConfig
    _supports_cache_class = False

    def __init__(self, hmm):
        super().__init__(ToyConfig(vocab_size=PAD + 1, eos_token_id=[5, 6], pad_token_id=PAD, is_encoder_decoder=False))
        start, transition, emission, block = hmm
        self.first, self.matrix = start, transition
        self.full = dense_emission(emission, block, len(start))
        self.anchor = torch.nn.Parameter(torch.zeros(1))  # transformers asks for a device
        self.generation_config.eos_token_id, self.generation_config.pad_token_id = [5, 6], PAD
        self.calls = 0

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        self.calls += 1
        logits = torch.full((*input_ids.shape, PAD + 1), -30.0)
        for i, row in enumerate(input_ids.tolist()):
            predicted = self.first
            for t, token in enumerate(row):
                if token < len(PIECES) and (attention_mask is None or attention_mask[i, t]):
                    alpha = predicted * self.full[:, token]
                    predicted = alpha @ self.matrix / alpha.sum()
                logits[i, t, : len(PIECES)] = torch.tensor(np.log(predicted @ self.full))
        return CausalLMOutput(logits=logits)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def _prepare_cache_for_generation(self, *args, **kwargs):
        return None


class ToyTokenizer:
    """Just enough of a Hugging Face tokenizer for `vlhmm.steering.generate`; ids 0-4 write `PIECES`."""

    all_special_ids = [5, 6]
    eos_token_id, pad_token_id, chat_template = 5, PAD, None

    def get_vocab(self):
        return {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġa": 4, "<e>": 5, "</e>": 6}

    def encode(self, text, add_special_tokens=False):
        return [{"a": 0, "b": 1, " ": 2}[letter] for letter in text]

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(PIECES[i] or b"" for i in ids).decode()

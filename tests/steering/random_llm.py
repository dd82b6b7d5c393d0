"""A causal language model of `transformers` with random weights over a small byte-level tokenizer."""

from pathlib import Path

import tokenizers
import torch

LINES = [
    f"The {a} dog saw {b} in the park ." for a in ("big", "old", "red", "sly") for b in ("Ann", "a cat", "us", "rain")
]


def make_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """A byte-level BPE of some 300 ids: 256 bytes, special tokens, merges of the lines."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.save(str(path))
    return tokenizer


def save_llm(folder: Path, width: int = 336, ends: tuple[int, ...] = (1, 0)) -> Path:
    """A Llama of two layers and random weights; its logits are wider than the vocabulary, and two ids end a text."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder / "tokenizer.json")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=width, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, eos_token_id=list(ends), bos_token_id=None, pad_token_id=None, initializer_range=0.6,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=list(ends))
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    fast.save_pretrained(folder)
    return folder

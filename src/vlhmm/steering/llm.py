"""Load a causal language model of `transformers` from a folder, a hub name, or a .gguf file.

`transformers` (extra `llm`) is imported only when a model is opened.
"""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from vlhmm.data.tokenizer import TokenVocabulary
from vlhmm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Precision = Literal["auto", "float32", "bfloat16"]
_ROWS = 32  # of logits at a time, so that their probabilities stay in the cache
_RUN = 256  # ids per run: drawing a run first is faster than a cumulative sum over all ids
PLACEHOLDER = "{prompt}"  # what a template has in place of the prompt


@dataclass(frozen=True, eq=False)
class LLM:
    """A causal language model with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Return all ids that end a text. The first one represents them in an HMM distilled from the model."""
        configured = [self.tokenizer.eos_token_id]
        for config in (self.model.generation_config, self.model.config):
            found = getattr(config, "eos_token_id", None)
            configured += list(found) if isinstance(found, list | tuple) else [found]
        ids = tuple(dict.fromkeys(int(i) for i in configured if i is not None))
        if not ids:
            raise ConfigError(f"{self.name} has no end-of-text token; set eos_token_id in its generation_config.json")
        return ids

    @cached_property
    def vocabulary(self) -> TokenVocabulary:
        """Return the ids of the tokenizer, as the vocabulary of an HMM."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"the tokenizer of {self.name} has no tokenizer.json; use a model with a fast tokenizer")
        return TokenVocabulary.from_bytes(backend.to_str().encode(), self.end_ids[0], f"the tokenizer of {self.name}")

    def prompt_ids(self, prompt: str, template: str | None = None) -> list[int]:
        """Return the ids that precede an answer.

        Args:
            prompt: The user's message.
            template: A text in which `{prompt}` is replaced by the prompt; by default the model's chat template, or the
                prompt itself if the model has none.
        """
        if template is not None:
            if PLACEHOLDER not in template:
                raise ConfigError(f"the template {template!r} has no {PLACEHOLDER}, which is replaced by the prompt")
            return list(self.tokenizer.encode(template.replace(PLACEHOLDER, prompt), add_special_tokens=False))
        if not getattr(self.tokenizer, "chat_template", None):
            return list(self.tokenizer.encode(prompt)) or [self.end_ids[0]]
        messages = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class CachedReader:
    """Reads a batch of sequences token by token, with the language model's cache if it has one.

    Equal sequences are read once and then copied. Shorter ones are padded on the left.
    """

    def __init__(self, llm: LLM, rows: Sequence[Sequence[int]]) -> None:
        self._model: Callable[..., Any] = llm.model
        self._device = llm.model.device
        number = {row: i for i, row in enumerate(dict.fromkeys(map(tuple, rows)))}
        ids, mask = left_padded(list(number), llm.end_ids[0])
        self._ids, self._mask = ids.to(self._device), mask.to(self._device)
        self._new = self._ids
        self._cache: Any = None
        self._takes = set(inspect.signature(llm.model.forward).parameters)
        self._copies: np.ndarray | None = np.array([number[tuple(row)] for row in rows])

    def logits(self) -> Tensor:
        """Return the logits of the next token, (n, V')."""
        options = {
            "position_ids": (self._mask.cumsum(1) - 1).clamp(min=0)[:, -self._new.shape[1] :],
            "logits_to_keep": 1,
            "use_cache": True,
            "past_key_values": self._cache,
        }
        with torch.inference_mode():
            out = self._model(
                input_ids=self._new,
                attention_mask=self._mask,
                **{name: value for name, value in options.items() if name in self._takes},
            )
        self._cache = getattr(out, "past_key_values", None) if "past_key_values" in self._takes else None
        logits = out.logits[:, -1]
        if self._copies is not None:
            logits = logits[torch.from_numpy(self._copies).to(self._device)]
            self.select(self._copies)
            self._copies = None
        return logits

    def read(self, tokens: Tensor) -> None:
        """Append one token to each sequence."""
        new = tokens[:, None].to(self._device)
        self._ids = torch.cat([self._ids, new], dim=1)
        self._mask = torch.cat([self._mask, torch.ones_like(new)], dim=1)
        self._new = new if self._cache is not None else self._ids

    def select(self, rows: np.ndarray) -> None:
        """Continue with the given rows. A row may occur several times or not at all."""
        index = torch.from_numpy(rows).to(self._device)
        self._ids, self._mask = self._ids[index], self._mask[index]
        if self._cache is not None:
            self._cache.batch_select_indices(index)


def left_padded(rows: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, (n, longest), of sequences aligned at their ends."""
    longest = max(map(len, rows))
    ids = [[filler] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def draw_ids(logits: Tensor, uniforms: Tensor, temperature: float = 1.0) -> Tensor:
    """Draw ids from softmax(logits / temperature), (n,), with two uniforms each (n, 2): one for a run of ids, one within it.

    Many times faster than `torch.multinomial`, which draws an exponential variable for every id.
    """
    parts = zip(logits.split(_ROWS), uniforms.split(_ROWS), strict=True)
    return torch.cat([_drawn(*part, temperature) for part in parts])


def _drawn(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    weights = logits.float()
    weights = (weights - weights.amax(dim=1, keepdim=True)).div_(temperature).exp_()
    weights = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _RUN)).view(len(weights), -1, _RUN)
    run = _inverse_cdf(weights.sum(dim=2), uniforms[:, 0])
    return run * _RUN + _inverse_cdf(weights[torch.arange(len(run)), run], uniforms[:, 1])


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index of each row whose cumulative weight exceeds that share of the sum. Its weight is never zero."""
    cumulative = weights.double().cumsum(dim=1)
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]


def open_llm(name: str | Path, precision: Precision = "auto") -> LLM:
    """Load a language model and its tokenizer.

    Args:
        name: A folder written by `save_pretrained`, a `.gguf` file, or a name on the Hugging Face hub.
        precision: Number format of the weights; "auto" means bfloat16 on processors with instructions for it, else float32.

    Returns:
        The model with its tokenizer.

    Raises:
        ConfigError: The extra `llm` is not installed.
        DataError: There is no such model, or `transformers` cannot read it.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError("transformers is not installed; pip install 'vlhmm[llm]'") from None
    path, name = Path(name), str(name)
    if name.endswith(".gguf"):
        if not path.is_file():
            raise DataError(f"no such file: {name}; expected a .gguf file, a model's folder or a hub name")
        source, options = str(path.parent), {"gguf_file": path.name}
    elif path.is_dir():
        if not (path / "config.json").exists():
            files = sorted(path.glob("*.gguf"))
            remedy = f"name its file, e.g. {files[0]}" if files else "expected a folder made by save_pretrained"
            raise DataError(f"{name} has no config.json; {remedy}")
        source, options = name, {}
    elif path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise DataError(f"no such folder: {name}; expected a model's folder, a .gguf file or a hub name")
    else:
        source, options = name, {}
    try:
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype_of(precision), **options)
    except Exception as error:  # transformers raises many kinds of errors
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"transformers cannot load {name}: {reason}") from None
    return LLM(name, model.eval(), tokenizer)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence `transformers` while it loads."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the dtype of the weights for a precision."""
    if precision == "auto":
        return torch.bfloat16 if has_bfloat16() else torch.float32
    if precision not in ("float32", "bfloat16"):
        raise ConfigError(f"unknown precision {precision!r}, expected auto, float32 or bfloat16")
    return torch.float32 if precision == "float32" else torch.bfloat16


def has_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16 products."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    if platform.system() != "Linux" or not os.path.exists("/proc/cpuinfo"):
        return False
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if line.startswith(("flags", "Features")):
                return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(line.split()))
    return False

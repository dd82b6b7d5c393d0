"""Convert text to ids and back, as clients see them. Input: a vocabulary. Output: ids of words, <eos> for a newline, <bos>.

<bos> is not a word of the model: its id is the size of the vocabulary, and it may only be the first token. It marks the
start of a text, so that clients that need one token of context (lm-evaluation-harness) have one of probability one. Its
id is never 0, which some clients read as missing.
"""

from collections.abc import Sequence

from vlhmm.data.tokenizer import TokenVocabulary
from vlhmm.data.vocabulary import EOS, Vocabulary
from vlhmm.limits import shortened
from vlhmm.server.errors import RequestError

BOS = "<bos>"


class Tokenizer:
    """Splits text at blanks; a newline ends a sentence."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.bos = len(vocabulary)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Words that are not in the vocabulary become <unk>."""
        ids: list[int] = []
        if text.split(maxsplit=1)[:1] == [BOS] and BOS not in self.vocabulary:
            ids, text = [self.bos], text.split(BOS, 1)[1]
        id_of, unk = self.vocabulary.id_of, self.vocabulary.unk
        for number, line in enumerate(text.split("\n")):
            if number:
                ids.append(self.vocabulary.eos)
            ids += [id_of.get(word, unk) for word in line.split()]
        return ids

    def bare(self, ids: Sequence[int]) -> Sequence[int]:
        """Return ids without <bos>, at which the chain starts anyway."""
        return ids[1:] if ids and ids[0] == self.bos else ids

    def sentence(self, text: str) -> str:
        """Return a text as the library's queries take it, which read a newline as a blank and know no <bos>."""
        if text.split(maxsplit=1)[:1] == [BOS] and BOS not in self.vocabulary:
            text = text.split(BOS, 1)[1]
        return text.replace("\n", f" {self.vocabulary.words[self.vocabulary.eos]} ")

    def num_oov(self, text: str) -> int:
        """Return the number of words of a text that are not in the vocabulary."""
        return sum(word not in self.vocabulary and word != BOS for word in text.split())

    def check(self, ids: Sequence[object], param: str) -> list[int]:
        """Return the ids that a client sent. Raise a RequestError if the model does not have one of them."""
        found: list[int] = []
        for place, value in enumerate(ids):
            if isinstance(value, bool) or not isinstance(value, int):
                raise RequestError(f"{param} holds {str(value)[:40]!r}, expected token ids", param)
            if value == self.bos and place > 0:
                raise RequestError(
                    f"{BOS} ({value}) stands at place {place} of {param}, expected at the start only", param
                )
            if not 0 <= value <= self.bos:
                raise RequestError(f"no token {shortened(value)}: ids are 0 to {self.bos - 1}, and {self.bos} for {BOS}", param)
            found.append(value)
        return found

    def word(self, token: int) -> str:
        """Return the text of a token."""
        return BOS if token == self.bos else self.vocabulary.words[token]

    def shown(self, token: int, first: bool) -> str:
        """Return the text of a token within a text: with a blank before it, except at the start."""
        return self.word(token) if first else " " + self.word(token)

    def spelled(self, token: int, first: bool) -> bytes:
        """Return the bytes that a token adds to a text."""
        return self.shown(token, first).encode()

    def words(self, ids: Sequence[int], first: bool = True) -> list[str]:
        """Return the texts of tokens. `first` says whether they begin the text."""
        return [self.shown(token, first and place == 0) for place, token in enumerate(ids)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, the inverse of `encode`."""
        return "".join(self.words(ids))

    def text(self, words: Sequence[str], first: bool) -> str:
        """Return the text of words, at the start of a text or within it."""
        return ("" if first or not words else " ") + " ".join(words)

    def info(self) -> dict[str, object]:
        """Return the description of the tokenizer that clients request."""
        return {
            "tokenizer_class": "whitespace",
            "bos_token": BOS,
            "bos_token_id": self.bos,
            "eos_token": EOS,
            "eos_token_id": self.vocabulary.eos,
            "pad_token": None,
            "unk_token": self.vocabulary.words[self.vocabulary.unk],
            "unk_token_id": self.vocabulary.unk,
            "vocab_size": len(self.vocabulary),
            "chat_template": None,
        }


class SubwordTokenizer(Tokenizer):
    """A Hugging Face tokenizer. Pieces include their blanks; the end of a text is a token."""

    vocabulary: TokenVocabulary

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, after <bos> if it begins with that."""
        if text.startswith(BOS):
            return [self.bos, *self.vocabulary.ids(text.removeprefix(BOS))]
        return self.vocabulary.ids(text)

    def sentence(self, text: str) -> str:
        """Return a text without its <bos>."""
        return text.removeprefix(BOS)

    def num_oov(self, text: str) -> int:
        """Return 0: every text can be tokenized."""
        return 0

    def word(self, token: int) -> str:
        """Return the text of a token; OpenAI's notation if its bytes are not whole characters."""
        if token == self.bos or token in self.vocabulary.special:
            return BOS if token == self.bos else self.vocabulary.words[token]
        spelled = self.vocabulary.token_bytes[token]
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def shown(self, token: int, first: bool) -> str:
        """Return the text of a token; its blank is part of it."""
        return self.word(token)

    def spelled(self, token: int, first: bool) -> bytes:
        """Return the bytes that a token adds to a text."""
        return b"" if token == self.bos else self.vocabulary.token_bytes[token]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return b"".join(self.spelled(token, False) for token in ids).decode(errors="replace")

    def text(self, words: Sequence[str], first: bool) -> str:
        """Return the text of pieces."""
        return self.vocabulary.join(words)

    def info(self) -> dict[str, object]:
        """Return the description of the tokenizer that clients request."""
        end = self.vocabulary.words[self.vocabulary.eos]
        none = {"unk_token": None, "unk_token_id": None}
        return super().info() | none | {"tokenizer_class": "subword", "eos_token": end}


def tokenizer_of(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of a model's vocabulary."""
    return SubwordTokenizer(vocabulary) if isinstance(vocabulary, TokenVocabulary) else Tokenizer(vocabulary)

"""Perplexity as `vlhmm evaluate` counts it: tokens are the words and one <eos> per line."""


def one_line(doc: dict[str, str]) -> str:
    """Return a line as it is scored; the newline is its <eos>."""
    return doc["text"].strip() + "\n"


def whole_text(doc: dict[str, str]) -> str:
    """Return a file as it is scored: every line ends with an <eos>."""
    return "".join(line.strip() + "\n" for line in doc["text"].splitlines())


def lines_results(doc: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """Return the log-likelihood of a line and its number of tokens."""
    return {"word_perplexity": (results[0], len(doc["text"].split()) + 1)}


def text_results(doc: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """Return the log-likelihood of a file and its number of tokens."""
    return {"word_perplexity": (results[0], len(doc["text"].split()) + len(doc["text"].splitlines()))}

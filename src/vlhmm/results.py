"""What queries return: small frozen dataclasses that turn into dicts and data frames."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas


class Result:
    """Base of every query result. Subclasses are frozen dataclasses with plain fields."""

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain Python values: nested results and named tuples as dicts, tensors and arrays as lists.

        Example:
            >>> from vlhmm.queries.next_word import WordProbability
            >>> WordProbability("states", 0.0).to_dict()
            {'word': 'states', 'log_prob': 0.0}
        """
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self.to_dict())


def html_table(caption: str, cells: Mapping[str, object]) -> str:
    """Return an HTML table with one row per name, for notebooks."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in cells.items()
    )
    return f"<table><caption>{html.escape(caption)}</caption>{rows}</table>"


def _plain(value: object) -> object:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def to_frame(results: Iterable[Result]) -> pandas.DataFrame:
    """Return a pandas data frame with one row per result. Needs pandas.

    Args:
        results: What a query returned, e.g. `model.next_word("the", top_k=5)` or `model.sample(10)`.

    Returns:
        A frame whose columns are the fields of the results.

    Raises:
        ConfigError: pandas is not installed.

    Example:
        >>> frame = vlhmm.to_frame(model.next_word("the", top_k=5))    # doctest: +SKIP
    """
    try:
        import pandas
    except ImportError:
        from vlhmm.errors import ConfigError

        raise ConfigError("to_frame needs pandas, which is not installed; pip install pandas") from None
    return pandas.DataFrame([result.to_dict() for result in results])

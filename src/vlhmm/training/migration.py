"""Settings of earlier versions: what they are called today, and which of them are gone.

Run folders and records hold the settings they were made with. They are never rewritten; this module translates them when
they are read.
"""

from collections.abc import Iterator
from typing import Any

# Settings that no longer exist, with the value that had no effect. A run with another value can be used, not resumed.
REMOVED: dict[str, Any] = {
    "training.accumulate": 1,
    "training.state_decay": None,
    "training.guide_draws": 0,
    "training.guide_share": 0.5,
}

RENAMED = {
    "model.first_spread": "model.emission_init_scale",
    "model.slot_code": "model.source_block_init",
    "training.m_parts": "training.m_step_row_parts",
    "training.m_steps": "training.m_step_updates",
}


def migrated(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate settings of an earlier version to today's names.

    Returns: the settings, and those removed ones that had an effect, by their old dotted names.
    """
    removed = {name: value for name, value in flattened(settings) if name in REMOVED and value != REMOVED[name]}
    return _renamed(settings), removed


def _renamed(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings under today's names, without those that no longer exist."""
    return {
        RENAMED.get(prefix + name, name).rpartition(".")[2]: _renamed(value, f"{prefix}{name}.")
        if isinstance(value, dict)
        else value
        for name, value in settings.items()
        if prefix + name not in REMOVED
    }


def flattened(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for every setting of nested groups."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value

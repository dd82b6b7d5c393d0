"""Settings of earlier versions: what they are called today, and which of them are gone.

Run folders and records hold the settings they were made with. They are never rewritten; this module translates them when
they are read.
"""

import copy
from typing import Any

from vlhmm.config import flattened

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
    "training.guide_weight": "distillation.weight",
    "training.guide_full": "distillation.full",
    "training.guide_until": "distillation.until",
    "training.guide_text": "distillation.text",
}


def migrated(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate settings of an earlier version to today's names.

    Returns: the settings, and those removed ones that had an effect, by their old dotted names.
    """
    removed = {name: value for name, value in flattened(settings) if name in REMOVED and value != REMOVED[name]}
    today = copy.deepcopy(settings)
    for name in REMOVED:
        _pop(today, name)
    for old, new in RENAMED.items():
        found = _pop(today, old)
        group, _, name = new.partition(".")
        if found and isinstance(place := today.setdefault(group, {}), dict):  # a reader refuses what is no group
            place[name] = found[0]
    return today, removed


def _pop(settings: dict[str, Any], dotted: str) -> list[Any]:
    """Remove a setting. Returns its value in a list, or an empty list if there is none."""
    group, _, name = dotted.partition(".")
    place = settings.get(group)
    return [place.pop(name)] if isinstance(place, dict) and name in place else []

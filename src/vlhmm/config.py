"""Settings as frozen dataclasses: to JSON and back, and typed dotted overrides (`training.rate=0.01`)."""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from vlhmm.errors import ConfigError
from vlhmm.limits import MAX_DIGITS, digits, shortened

FEW_NAMES = 16  # that an error message lists in full

Config = TypeVar("Config")
Value = TypeVar("Value")


def to_dict(config: Any) -> dict[str, Any]:
    """Return a dataclass as plain JSON values, nested dataclasses as nested objects."""
    return dataclasses.asdict(config)


def to_json(value: Any, **how: Any) -> str:
    """Return JSON that every reader accepts: infinities are "inf" and "-inf", NaN is null."""
    return json.dumps(_sayable(value), ensure_ascii=False, allow_nan=False, **how)


def _sayable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _sayable(each) for key, each in value.items()}
    return [_sayable(each) for each in value] if isinstance(value, list | tuple) else value


def from_dict(kind: type[Config], values: dict[str, Any], where: str = "") -> Config:
    """Return a dataclass of that kind from JSON values; an unknown key is refused with the nearest name."""
    hints = typing.get_type_hints(kind)
    chosen = {}
    for key, value in values.items():
        if key not in hints:
            raise unknown("setting", where + key[:60], [where + name for name in hints])
        hint = hints[key]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, dict):
            chosen[key] = from_dict(hint, value, f"{where}{key}.")
        else:
            chosen[key] = converted(value, hint, where + key)
    return kind(**chosen)


def override(config: Config, assignments: list[str]) -> Config:
    """Return the same settings with `a.b=c` applied for each assignment; checked when all of them are in place."""
    values = to_dict(config)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set takes name=value, got {assignment!r}")
        assign(type(config), values, path, text, dotted_names(config))
    return from_dict(type(config), values)


def assign(kind: type, values: dict[str, Any], path: str, text: str, known: list[str]) -> None:
    """Set one dotted name in nested values, `text` read as its field's type."""
    *groups, name = path.split(".")
    for group in groups:
        kind = typing.get_type_hints(kind).get(group, str)
        if not dataclasses.is_dataclass(kind):
            raise unknown("setting", path, known)
        values = values[group]
    hint = typing.get_type_hints(kind).get(name)
    if hint is None:
        raise unknown("setting", path, known)
    if dataclasses.is_dataclass(hint):
        inside = [other for other in known if other.startswith(path + ".")]
        raise ConfigError(f"{path} is a group of settings; set one of them: {', '.join(inside)}")
    values[name] = parsed(text, hint, path)


def flattened(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for every setting of nested groups."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def dotted_names(config: Any) -> list[str]:
    """Return the dotted names of all settings."""
    return [name for name, _ in flattened(to_dict(config))]


def setting(default: Value, help: str, group: str = "") -> Value:
    """Return a field of a configuration with a sentence on what it sets, and the group it is listed under."""
    return typing.cast(Value, dataclasses.field(default=default, metadata={"help": help, "group": group}))


class Setting(NamedTuple):
    """What there is to know of one setting."""

    name: str  # dotted
    choices: str  # its type, or the values it may have
    default: str
    meaning: str  # a sentence
    group: str  # what it belongs to


def settings_of(kind: type, prefix: str = "") -> list[Setting]:
    """Return all settings of a configuration, in the order in which the source has them."""
    hints = typing.get_type_hints(kind)
    found: list[Setting] = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found += settings_of(typing.cast(type, hint), f"{prefix}{field.name}.")
        else:
            if typing.get_origin(hint) is typing.Literal:
                names = list(typing.get_args(hint))
            else:
                names = ["none" if k is type(None) else k.__name__ for k in alternatives(hint)]
            default = "none" if field.default is None else str(field.default)
            help, group = field.metadata.get("help", ""), field.metadata.get("group", "")
            found.append(Setting(prefix + field.name, " | ".join(names), default, help, group))
    return found


def by_group(settings: list[Setting]) -> dict[str, list[Setting]]:
    """Return the settings under the names of their groups, both in the order of the source."""
    groups: dict[str, list[Setting]] = {}
    for each in settings:
        groups.setdefault(each.group, []).append(each)
    return groups


def parsed(text: str, hint: Any, name: str) -> Any:
    """Return `text` as the type of a field: numbers may be written 2^15, 1e-3 or 32_768; none clears an optional one."""
    kinds = alternatives(hint)
    if type(None) in kinds and text.lower() in ("none", "null", ""):
        return None
    if typing.get_origin(hint) is typing.Literal:
        return converted(text, hint, name)
    if bool in kinds:
        if text.lower() in ("true", "yes", "1", "on", "false", "no", "0", "off"):
            return text.lower() in ("true", "yes", "1", "on")
        raise ConfigError(f"{name} takes true or false, got {text!r}")
    try:
        if int in kinds:
            base, power, exponent = text.partition("^")
            if power:
                low, high = digits(base.strip()), digits(exponent.strip())
                if low is None or high is None or low > 1024 or high > MAX_DIGITS * 3 or low**high >= 10**MAX_DIGITS:
                    raise ValueError
                return low**high
            found_digits = digits(text.strip().removeprefix("-").replace("_", ""))
            if found_digits is None:
                raise ValueError
            return -found_digits if text.strip().startswith("-") else found_digits
        if float in kinds:
            return float(text)
    except ValueError:
        wanted = f"a whole number of at most {MAX_DIGITS} digits" if int in kinds else "a number"
        raise ConfigError(f"{name} takes {wanted}, got {shortened(text)}") from None
    return text


def converted(value: Any, hint: Any, name: str) -> Any:
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            raise unknown(f"value of {name}", shortened(value), [str(v) for v in typing.get_args(hint)])
        return value
    kinds = alternatives(hint)
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise ConfigError(f"{name}={shortened(value)} is out of range, expected at most {MAX_DIGITS} digits")
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        return float(value)
    if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{name} takes {' or '.join(k.__name__ for k in kinds)}, got {shortened(value)}")
    return value


def alternatives(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return list(typing.get_args(hint))
    return [hint]


def unknown(what: str, got: str, known: list[str]) -> ConfigError:
    """Return the error for an unknown name: 'no preset named pper-ptb; did you mean paper-ptb?'"""
    got = got if len(got) <= 60 else got[:57] + "..."
    near = difflib.get_close_matches(got, known, n=1, cutoff=0.5)
    if near:
        remedy = f"did you mean {near[0]}?"
    elif len(known) <= FEW_NAMES:
        remedy = f"there are: {', '.join(known)}"
    else:
        remedy = f"there are {len(known)}: {', '.join(known[:3])} ..." + ("; --list-settings shows them" if what == "setting" else "")
    return ConfigError(f"no {what} named {got!r}; {remedy}")

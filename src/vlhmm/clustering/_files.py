"""Lines of the text files this package keeps."""

from pathlib import Path

from vlhmm.data.atomic_io import display_name, open_bytes
from vlhmm.errors import DataError
from vlhmm.limits import MAX_STATES, digits, shortened


def numbered_lines(path: str | Path) -> list[tuple[int, str]]:
    """Return (number, line) of a UTF-8 file, split at newlines only: a word may hold any other odd character."""
    with open_bytes(path) as stream:
        content = stream.read()
    if not content:
        raise DataError(f"{display_name(path)} is empty")
    lines = []
    for number, raw in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            lines.append((number, raw.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")))
        except UnicodeDecodeError:
            raise DataError(f"{display_name(path)}, line {number}: not UTF-8; convert the file to UTF-8") from None
    return lines


def parse_integers(where: str, text: str) -> list[int]:
    """Return the comma separated whole numbers of `text`, each at most `MAX_STATES`."""
    found = [digits(part) for part in text.split(",")]
    numbers = [number for number in found if number is not None and number <= MAX_STATES]
    if len(numbers) < len(found):
        raise DataError(f"{where}: got {shortened(text)}, expected whole numbers of at most {MAX_STATES:,}")
    return numbers

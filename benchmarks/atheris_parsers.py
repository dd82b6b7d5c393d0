"""Coverage-guided fuzzing of the parsers, where atheris is installed (pip install atheris; Linux, CPython 3.11 to 3.13).

    python -m benchmarks.atheris_parsers -runs=100000 [more options of libFuzzer]

The first byte of an input chooses the parser: masks, regular expressions, phrases, settings, ARPA, `paths`,
blocks, vocabularies, texts. What is no `VlhmmError` is a finding: add it to tests/trust/findings.json.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["vlhmm.constraints", "vlhmm.lattice.template", "vlhmm.baselines.arpa", "vlhmm.clustering"]):
    from benchmarks import fuzz

from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import VlhmmError

KINDS = ("mask", "regex", "phrase", "setting", "arpa", "paths", "blocks", "vocabulary", "text")


def main() -> None:
    """Run libFuzzer with the arguments of the command line."""
    with tempfile.TemporaryDirectory(prefix="vlhmm-atheris-") as name:
        folder = Path(name)
        world = fuzz.World(folder, {}, Vocabulary((*fuzz.WORDS, "<eos>", "<unk>")))

        def one(data: bytes) -> None:
            if not data:
                return
            text = data[1:].decode("utf-8", "surrogateescape")
            try:
                fuzz.parsed(KINDS[data[0] % len(KINDS)], text, world, folder)
            except VlhmmError:
                pass

        atheris.Setup([*sys.argv, "-timeout=30"], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

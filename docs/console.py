"""Runs the commands shown in a document and writes their answers below them.

    python docs/console.py docs/queries.md runs/demo

In every block marked `console` a line that begins with "$ " is a command; what follows it, up to the next
command, is replaced by what it prints. `runs/demo` in a command stands for the run given here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def answered(block: str, run: str) -> str:
    """Return the block with every command's answer below it, standard error included."""
    lines = []
    for line in block.splitlines():
        if line.startswith("$ "):
            command = line[2:].replace("runs/demo", run)
            found = subprocess.run(
                command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
            )
            lines += [line, *found.stdout.replace(run, "runs/demo").expandtabs(4).rstrip().splitlines()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    document, run = Path(sys.argv[1]), sys.argv[2]
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    text = document.read_text(encoding="utf-8")
    text = BLOCK.sub(lambda match: f"```console\n{answered(match[1], run)}```", text)
    document.write_text(text, encoding="utf-8")

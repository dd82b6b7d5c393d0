"""Imports point one way, and what needs no torch does without it."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONTRACTS = ROOT / ".importlinter"
HELP_SECONDS = 0.5  # of CPU time: other programs on the machine do not count


def run(code, *arguments):
    """A Python program in a process of its own: (exit code, everything it printed)."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": ""},
    )
    return done.returncode, done.stdout + done.stderr


def lint_imports(contracts):
    code = (
        "import sys; from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))"
    )
    return run(code, contracts)


def test_imports_point_down():
    code, printed = lint_imports(CONTRACTS)
    assert code == 0, printed
    assert "0 broken" in printed


@pytest.mark.parametrize(
    ("before", "after", "broken"),
    [
        (
            "    language_model\n    evaluation | queries\n",
            "    evaluation | queries\n    language_model\n",
            "vlhmm.language_model is not",
        ),
        (
            "    components\n    inference | clustering\n",
            "    components | inference | clustering\n",
            "vlhmm.components is not allowed to import",
        ),
        ("    lattice\n", "", "vlhmm.lattice"),  # a package without a place
        (
            "    vlhmm.clustering\n    vlhmm.config\n    vlhmm.errors\n",
            "    vlhmm.inference\n",
            "vlhmm.inference is not allowed to import torch",
        ),
        (
            "source_modules =\n    vlhmm\nforbidden_modules =\n    paper\n",
            "source_modules =\n    paper\nforbidden_modules =\n    vlhmm\n",
            "paper is not allowed to import vlhmm",
        ),
        (
            "    vlhmm.training.checkpoint\n",
            "    vlhmm.training.trainer\n",
            "vlhmm.training.trainer is not allowed to import vlhmm.training.distillation",
        ),
    ],
)
def test_the_proof_can_fail(tmp_path, before, after, broken):
    text = CONTRACTS.read_text(encoding="utf-8")
    assert before in text
    altered = tmp_path / "contracts.ini"
    altered.write_text(text.replace(before, after), encoding="utf-8")
    code, printed = lint_imports(altered)
    assert code == 1
    assert broken in " ".join(printed.split())


WITHOUT_TORCH = {
    "import vlhmm": "import vlhmm",
    "text, vocabularies and blocks": "import vlhmm.data, vlhmm.clustering.blocks",
    "presets": "import vlhmm.training.presets",
    "vlhmm --help": "from vlhmm.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
    "the help of every verb": (
        "from vlhmm.cli.main import available, main\n"
        "for verb in available():\n"
        "    try: main([verb, '--help'])\n"
        "    except SystemExit: pass"
    ),
}


@pytest.mark.parametrize("what", WITHOUT_TORCH)
def test_torch_is_not_loaded_for(what):
    code, printed = run(WITHOUT_TORCH[what] + "\nimport sys\nsys.exit('torch' in sys.modules and 'torch was loaded')")
    assert code == 0, printed


def test_help_is_quick():
    command = [sys.executable, "-m", "vlhmm", "--help"]
    seconds = []
    for _ in range(3):  # the first may still have bytecode to write
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "verbs" in done.stdout
    assert min(seconds) < HELP_SECONDS, seconds

"""Every example runs as a newcomer would run it, and says what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_script_has_a_test() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == ["two_engines.py"]


def test_two_engines_without_vllm() -> None:
    said = run("two_engines.py")
    assert said == "every token right on 3 ranks; the prefill engine says: blocks are free\n"
    assert len((EXAMPLES / "two_engines.py").read_text().splitlines()) < 150

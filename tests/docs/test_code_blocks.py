"""Every Python block in the documentation runs, in order, and prints what the comment lines after a print say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SOURCES = [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in SOURCES if BLOCK.search(path.read_text()))


def test_there_are_pages_with_code() -> None:
    assert "docs/algebra.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run_and_print_what_the_page_says(page: str) -> None:
    names: dict[str, object] = {"__name__": "docs"}
    for number, code in enumerate(BLOCK.findall((ROOT / page).read_text())):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"{page}#{number}", "exec"), names)
        said = [line[2:] for line in code.splitlines() if line.startswith("# ")]
        printed = out.getvalue().splitlines()
        if "print(" in code:
            assert printed == said[-len(printed) :]

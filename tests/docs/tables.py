"""Tables of the documentation that come from the code: metrics, reasons, settings. Run it to write them anew.

    python -m tests.docs.tables

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import kvplan.session.config
from kvplan.session import REASONS, SessionConfig
from kvplan.session.advice import advice
from kvplan.session.declared import METRICS
from kvplan.wire.asking import SENTENCES
from tests.session.faults import table as faults

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"
NOTES = ROOT / "docs" / "design-notes.md"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def metrics() -> list[str]:
    rows = [f"| `{one.prometheus}` | {one.kind.value} | {one.label} | {one.help} |" for one in METRICS.values()]
    return ["| metric | kind | label | what it counts |", "|---|---|---|---|", *rows]


def reasons() -> list[str]:
    rows = [f"| `{reason}` | {meaning} | {advice(reason)} |" for reason, meaning in sorted(REASONS.items())]
    return ["| reason | what happened | what to do |", "|---|---|---|", *rows]


def settings() -> list[str]:
    texts = _field_texts()
    rows = [
        f"| `{one.name}` | `{getattr(SessionConfig(), one.name)!r}` | {texts.get(one.name, '')} |"
        for one in fields(SessionConfig)
    ]
    return ["| key | default | meaning |", "|---|---|---|", *rows]


def unreachable() -> list[str]:
    return [
        "| what is wrong | what the command says |",
        "|---|---|",
        *(f"| {why} | {text} |" for why, text in SENTENCES.items()),
    ]


def _field_texts() -> dict[str, str]:
    """The line under each field of SessionConfig."""
    tree = ast.parse(Path(kvplan.session.config.__file__).read_text())
    [config] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SessionConfig"]
    found = {}
    for field, text in zip(config.body, config.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def written_anew(page: str) -> str:
    tables = {"faults": faults, "metrics": metrics, "reasons": reasons, "settings": settings,
              "unreachable": unreachable}  # fmt: skip
    return MARKED.sub(lambda found: found[1] + "\n".join(tables[found[2]]()) + "\n" + found[3], page)


if __name__ == "__main__":
    for page in (PAGE, NOTES):
        page.write_text(written_anew(page.read_text()))

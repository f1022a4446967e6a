"""Layer names that stand for many: ``model.layers.{0..31}.self_attn``, and back. No layers, no files.

``{a..b}`` counts from a to b, both included; ``{a..b..s}`` in steps of s; ``{a,b,c}`` lists.
"""

from __future__ import annotations

import re

from kvplan.errors import DescriptionError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(\d+))?")
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")

MAX_NAMES = 100_000
"""More layers than any model has; a longer range is a slip of the pen."""


def expand(name: str) -> list[str]:
    """Return every name that a name with braces stands for.

    >>> expand("layers.{0..4..2}.attn"), expand("layers.{1,5}.attn"), expand("plain")
    (['layers.0.attn', 'layers.2.attn', 'layers.4.attn'], ['layers.1.attn', 'layers.5.attn'], ['plain'])
    """
    match = _BRACES.search(name)
    if match is None:
        if not name or "{" in name or "}" in name:
            raise DescriptionError(f"{name!r} is not a layer name; ranges are written {{0..31}}", field="name")
        return [name]
    before, after = name[: match.start()], name[match.end() :]
    rest = expand(after) if after else [""]
    return [f"{before}{item}{tail}" for item in _items(match[1], name) for tail in rest]


def _items(text: str, name: str) -> list[str]:
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        items = [item.strip() for item in text.split(",")]
        if not all(re.fullmatch(r"\w+", item) for item in items):
            raise DescriptionError(f"{{{text}}} in {name!r} is not a range; write {{0..31}} or {{0,4}}", field="name")
        return items
    start, stop, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if step and (stop - start) // step >= MAX_NAMES:
        raise DescriptionError(f"{{{text}}} in {name!r} counts more than {MAX_NAMES} layers", field="name")
    if stop < start or step < 1:
        raise DescriptionError(f"{{{text}}} in {name!r} counts nothing; write the smaller number first", field="name")
    return [str(number) for number in range(start, stop + 1, step)]


def template(name: str) -> tuple[str, int | None]:
    """Return the name with its first number cut out, and the number.

    >>> template("model.layers.7.self_attn")
    ('model.layers.{}.self_attn', 7)
    """
    match = _NUMBER.search(name)
    if match is None:
        return name, None
    return f"{name[: match.start()]}{{}}{name[match.end() :]}", int(match[0])


def contract(pattern: str, numbers: list[int]) -> str:
    """Return one name that expands to the pattern with these numbers, ascending.

    >>> contract("layers.{}.attn", [0, 1, 2]), contract("layers.{}.attn", [5, 11, 17]), contract("layers.{}.attn", [3])
    ('layers.{0..2}.attn', 'layers.{5..17..6}.attn', 'layers.3.attn')
    """
    if len(numbers) == 1:
        return pattern.replace("{}", str(numbers[0]))
    step = numbers[1] - numbers[0]
    if step > 0 and numbers == list(range(numbers[0], numbers[-1] + 1, step)):
        tail = f"..{step}" if step > 1 else ""
        return pattern.replace("{}", f"{{{numbers[0]}..{numbers[-1]}{tail}}}")
    return pattern.replace("{}", "{" + ",".join(map(str, numbers)) + "}")

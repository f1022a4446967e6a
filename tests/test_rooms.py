"""The house rules that a machine can check: who imports whom, which words a room may know, sizes, first lines.

Arrows go one way: `vllm -> session -> transport, wire -> planner`, `layouts -> planner`. Docstrings and comments may
say what they like; names in the code may not.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "kvplan"
FILES = sorted(path for path in SOURCE.rglob("*.py") if "soft" not in path.parts)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50

FOR_ALL = {"errors", "version"}
ROOMS: dict[str, set[str]] = {
    "planner": set(),
    "transport": set(),
    "wire": {"planner"},
    "layouts": {"planner"},
    "session": {"planner", "transport", "wire"},
    "vllm": {"planner", "transport", "wire", "session", "layouts"},
    "testing": {"planner", "transport", "wire", "session"},
    "engines": set(),
    "proxy": set(),
    "cli": {"planner", "transport", "wire", "session", "layouts", "engines", "proxy", "testing"},
}
"""Each room, and the rooms that it may import. `cli` is the only one that sees everything but vLLM."""

OUTSIDE = {
    "planner": {"numpy"},
    "layouts": {"numpy", "msgspec", "yaml"},
    "transport": {"numpy", "msgspec", "nixl", "nixl_cu12", "torch"},
    "wire": {"msgspec", "zmq"},
    "session": {"numpy", "xxhash", "zmq", "prometheus_client"},
    "vllm": {"numpy", "torch", "vllm", "zmq", "msgspec", "prometheus_client"},
    "testing": {"numpy", "hypothesis", "pytest"},
    "engines": {"httpx", "prometheus_client", "torch", "transformers", "tokenizers"},
    "proxy": {"httpx", "starlette", "uvicorn"},
    "cli": {"typer", "rich", "yaml", "jinja2", "msgspec", "numpy", "click"},
}
"""Third-party packages that a room may import."""

LATE = {"torch", "transformers", "tokenizers", "nixl", "nixl_cu12"}
"""Heavy packages: outside `vllm`, only inside functions that need them."""

MODEL_WORDS = "mamba mamba1 mamba2 mla gqa mqa attention attn llama gdn ssm conv hnd nhd deepseek indexer tp pp dcp"
FORBIDDEN_WORDS = {
    "planner": MODEL_WORDS.replace(" tp pp dcp", "") + " vllm zmq socket peer request lease",
    "transport": MODEL_WORDS + " vllm token tokens head heads layer layers layout layouts axes span spans lease",
    "wire": MODEL_WORDS.replace(" tp pp dcp", "") + " vllm",
    "session": MODEL_WORDS.replace(" tp pp dcp", "") + " vllm axis axes span spans head heads nixl",
    "layouts": "pointer ptr socket vllm nixl peer lease",
    "proxy": MODEL_WORDS + " address addresses layout layouts",
}
"""Words that may not be part of any name in a room's code."""

ARRAYS_IN_SESSION = {"binding.py", "digest.py", "routing.py", "staging.py"}
"""The only files of `session` that touch arrays; what they compute is asked of `planner`."""


STANDARD_LIBRARY_NAMES = {"token_bytes", "token_hex"}
"""Names of `secrets` that hold a forbidden word and mean something else."""

MAKES_UP_ADDRESSES = {"engine.py", "__init__.py"}
"""The only files of `layouts` that speak of addresses: the made-up ones of a dry run."""


def room_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "front"


def rooms_files(room: str) -> list[Path]:
    return [path for path in FILES if room_of(path) == room]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> list[tuple[str, bool]]:
    """Dotted modules that a file imports, and whether it does so when it is loaded."""
    at_load = {id(node) for node in _outside_functions(tree(path))}
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(name.name, id(node) in at_load) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            names = [f"{base}.{name.name}" for name in node.names] if base == "kvplan" else [base]
            found += [(name, id(node) in at_load) for name in names]
    return found


def _outside_functions(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return []
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return []
    return [node, *(found for child in ast.iter_child_nodes(node) for found in _outside_functions(child))]


def names(path: Path) -> set[str]:
    """Every name that a file's code defines or uses. Keyword arguments of calls are the callee's words."""
    found = set()
    for node in ast.walk(tree(path)):
        for field in ("name", "id", "attr", "arg", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str) and not isinstance(node, ast.keyword):
                found.add(value)
    return found


def words(name: str) -> list[str]:
    return re.findall(r"[a-z]+[0-9]*|[0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())


def ids(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    end = function.end_lineno or function.lineno
    doc = function.body[0] if ast.get_docstring(function, clean=False) is not None else None
    return end - function.lineno + 1 - ((doc.end_lineno or 0) - doc.lineno + 1 if doc else 0)


def test_every_room_has_a_rule():
    assert {room_of(path) for path in FILES} - {"front"} == set(ROOMS) == set(OUTSIDE)


def test_arrows_do_not_go_in_circles():
    def below(room, seen=()):
        assert room not in seen, f"circle through {room}"
        return {other for lower in ROOMS[room] for other in (lower, *below(lower, (*seen, room)))}

    for room in ROOMS:
        below(room)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_a_file_imports_only_what_its_room_may(path):
    room = room_of(path)
    wrong = []
    for module, at_load in imports(path):
        top, _, rest = module.partition(".")
        if top == "kvplan":
            target = rest.partition(".")[0]
            if room != "front" and target not in {room, *FOR_ALL, *ROOMS[room]}:
                wrong.append(f"room {target!r}")
        elif top not in sys.stdlib_module_names and not (top == "typing_extensions" and not at_load):
            if room != "front" and top not in OUTSIDE[room]:
                wrong.append(f"package {top!r}")
            elif at_load and top in LATE and room != "vllm":
                wrong.append(f"{top!r} when it is loaded; import it inside the function that needs it")
    assert not wrong, f"{ids(path)} must not import {', '.join(wrong)}"


@pytest.mark.parametrize("room", sorted(FORBIDDEN_WORDS))
def test_a_room_does_not_know_the_words_of_another(room):
    forbidden = set(FORBIDDEN_WORDS[room].split())
    found = {
        f"{ids(path)}: {name}"
        for path in rooms_files(room)
        for name in names(path) - STANDARD_LIBRARY_NAMES
        if forbidden & set(words(name))
    }
    assert not found, "\n".join(sorted(found))


def test_layouts_does_not_know_addresses():
    users = {path.name for path in rooms_files("layouts") if any("address" in words(name) for name in names(path))}
    assert users <= MAKES_UP_ADDRESSES


def test_session_leaves_arithmetic_on_arrays_to_the_planner():
    users = {path.name for path in rooms_files("session") if any(name == "numpy" for name, _ in imports(path))}
    assert users <= ARRAYS_IN_SESSION


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_files_and_functions_stay_small(path):
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{ids(path)} has {num_lines} lines"
    long = {one.name: code_lines(one) for one in functions(path) if code_lines(one) > MAX_FUNCTION_LINES}
    assert not long, f"{ids(path)}: functions of more than {MAX_FUNCTION_LINES} lines: {long}"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_a_file_begins_with_what_lives_in_it(path):
    doc = ast.get_docstring(tree(path))
    assert doc, f"{ids(path)} has no docstring"
    assert doc.splitlines()[0].strip().endswith((".", ":")), f"{ids(path)}: the first line is no sentence: {doc!r}"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_assert_guards_what_others_can_cause(path):
    """`python -O` removes asserts. They may state our own invariants in tests, not in the product."""
    lines = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)]
    assert room_of(path) == "testing" or not lines, f"{ids(path)}: assert in lines {lines}"


@pytest.mark.parametrize("room", sorted(set(ROOMS) - {"vllm"}))
def test_a_rooms_front_door_is_sorted_and_complete(room):
    module = import_module(f"kvplan.{room}")
    exported = getattr(module, "__all__", [])
    assert exported == sorted(exported, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert len(exported) == len(set(exported))
    missing = [name for name in exported if not hasattr(module, name)]
    assert not missing

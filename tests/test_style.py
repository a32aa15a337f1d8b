"""A ratchet on what linters do not see; a limit may be lowered, never raised."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import grimp
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 450
MAX_FUNCTION_LINES = 60
"""From `def` to the end, without the docstring."""
SLEEPS: dict[str, str] = {
    "tests/loop/runs_job.py": "the length of a step: the others have to be in the run when a killed replica is back",
    "tests/process_group/ranks.py": "polls for what only /proc shows; bounded",
    "tests/process_group/baby/test_group.py": "spreads the moment of an abort over the life of a collective",
    "tests/process_group/test_contract.py": "spreads the moment of an abort over the life of a collective",
}
"""Test files that may call `time.sleep`, each with the reason. Not as synchronisation: wait for the event instead."""


def python_files(*roots: str) -> list[Path]:
    """Checked in, or about to be; generated code left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *roots],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    paths = [ROOT / name for name in listed if name.endswith(".py") and "_pb2" not in name]
    return [path for path in paths if path.exists()]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The file, parsed."""
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def _no_tree_stays() -> Iterator[None]:
    """They are millions of objects, which each later collection of garbage would look at."""
    yield
    tree_of.cache_clear()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


SOURCES = python_files("ft_core", "ft_lightning", "ft_accelerate")
TESTS = python_files("tests")


def test_the_list_above_names_existing_files() -> None:
    assert SOURCES
    assert [name for name in SLEEPS if not (ROOT / name).exists()] == []


def test_files_stay_short() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}, "split it by noun"


def functions(path: Path) -> dict[str, int]:
    """Each function as "file:Class.function", with its number of lines."""
    found: dict[str, int] = {}

    def walk(node: ast.AST, outer: tuple[str, ...]) -> None:
        for inner in ast.iter_child_nodes(node):
            names = outer
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = (*outer, inner.name)
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                text = inner.body[0] if ast.get_docstring(inner) is not None else None
                docstring = 0 if text is None else (text.end_lineno or 0) - text.lineno + 1
                lines = (inner.end_lineno or 0) - inner.lineno + 1 - docstring
                key = f"{name_of(path)}:{'.'.join(names)}"
                found[key] = max(lines, found.get(key, 0))  # a property and its setter have one name
            walk(inner, names)

    walk(tree_of(path), ())
    return found


def test_functions_stay_short() -> None:
    found = {name: lines for path in SOURCES for name, lines in functions(path).items()}
    assert {name: lines for name, lines in found.items() if lines > MAX_FUNCTION_LINES} == {}, "split it"


def test_every_module_says_what_it_is() -> None:
    assert [name_of(path) for path in SOURCES + TESTS if not ast.get_docstring(tree_of(path))] == []


def swallows(handler: ast.ExceptHandler) -> bool:
    """Is it `except:`, `except Exception:` or `except BaseException:` with nothing but `pass` in it?"""
    catches_all = handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    )
    return catches_all and all(isinstance(statement, ast.Pass) for statement in handler.body)


def test_no_error_is_swallowed_whole() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert found == []


def is_sleep(called: ast.expr) -> bool:
    """`sleep(...)` or `time.sleep(...)`."""
    names = ("sleep", "time.sleep")
    return isinstance(called, ast.Name | ast.Attribute) and ast.unparse(called) in names


def test_tests_do_not_sleep() -> None:
    calls = [
        f"{name_of(path)}:{node.lineno}"
        for path in TESTS if name_of(path) not in SLEEPS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and is_sleep(node.func)
    ]  # fmt: skip
    assert calls == [], "wait for the event itself, or name the file and the reason in SLEEPS"


def lets_go(node: ast.With) -> bool:
    """Does it bind a socket, look up which port that is, and close it, with nothing else done meanwhile?"""
    inside = [part for statement in node.body for part in ast.walk(statement)]
    calls = {ast.unparse(part.func).rpartition(".")[2] for part in inside if isinstance(part, ast.Call)}
    waits = any(isinstance(part, ast.Yield) for part in inside)
    opens = any("socket" in ast.unparse(item.context_expr) for item in node.items)
    return opens and not waits and "getsockname" in calls and calls <= {"bind", "getsockname", "int", "str"}


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_no_port_is_looked_up_and_let_go(path: Path) -> None:
    """By the time that somebody uses it another process may have it."""
    found = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.With)
             and lets_go(node)]  # fmt: skip
    assert found == [], "hold it (tests/held_ports.py), or bind port 0 and read the port back"


def circles() -> set[frozenset[str]]:
    """The strongly connected parts of the import graph, of two modules and more."""
    graph = grimp.build_graph("ft_core", "ft_lightning", "ft_accelerate", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    below: dict[str, set[str]] = {}
    for module in imports:
        below[module], left = set(), [module]
        while left:
            for imported in imports[left.pop()] - below[module]:
                below[module].add(imported)
                left.append(imported)
    return {frozenset(m for m in below[module] if module in below[m]) for module in below if module in below[module]}


def test_no_modules_import_each_other() -> None:
    """Not for annotations either: a circle of ideas hides behind `if TYPE_CHECKING` as well."""
    assert [sorted(circle) for circle in circles()] == []


def writes(path: Path, owner: str) -> int:
    """Assignments to a field of `owner` (a pattern of names), or of its parts: a machine that belongs to others."""
    return sum(
        isinstance(node, ast.Attribute | ast.Subscript)
        and not isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Attribute if isinstance(node, ast.Subscript) else ast.expr)
        and re.search(rf"\b({owner})\b(?!\()", ast.unparse(node.value)) is not None
        for node in ast.walk(tree_of(path))
    )


def name_in(node: ast.Name | ast.Attribute | ast.alias) -> str:
    return str(getattr(node, "id", "") or getattr(node, "attr", "") or getattr(node, "name", ""))


def test_one_backend_is_as_good_as_another() -> None:
    """No code outside of process_group names Gloo; there, `default.py` does for everybody."""
    apart = ("ft_core/process_group/", "ft_core/__init__.py")
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES if not name_of(path).startswith(apart)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Name | ast.Attribute | ast.alias)
        and "gloo" in name_in(node).lower().replace("trainingloop", "")
    ]  # fmt: skip
    assert found == []


def test_only_the_machine_of_a_rank_writes_what_it_knows() -> None:
    """What the control plane, and the machine of a group, call a rank is another process."""
    others = ("protocol/rank/", "protocol/group/", "control/", "launch/")
    paths = [path for path in SOURCES if not any(other in name_of(path) for other in others)]
    assert [name_of(path) for path in paths if writes(path, r"_?rank(?!\[)")] == []


def test_only_the_machine_of_a_group_writes_what_it_knows() -> None:
    assert [name_of(path) for path in python_files("ft_core/control/group") if writes(path, "_group")] == []


def test_the_simulation_writes_no_field_of_a_machine() -> None:
    assert [name_of(path) for path in python_files("tests/simulation") if writes(path, "machine")] == []


def test_only_the_room_writes_what_it_knows() -> None:
    """Fields of a room, its table and its records, whatever a test or a shell would like to set up."""
    paths = [path for path in SOURCES + TESTS if "protocol/lighthouse/" not in name_of(path)]
    assert [name_of(path) for path in paths if writes(path, "_?room|records?|_records|_?table")] == []

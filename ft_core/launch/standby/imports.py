"""What a warm standby can import in advance: the modules that a script names at its top, read without running it.

How it works. The script is parsed, never imported: ftrun's own process must neither run user code nor hold the user's
modules. Taken are `import a.b` (a.b) and `from a.b import c` (a.b, and then c of it: packages load their parts only
when they are asked for, ours among them) on the top level and inside its `try:` and `with` blocks, in order, after
torch. Left out is whatever may not happen: under any `if` (such as `if __name__ == "__main__"` and
`if TYPE_CHECKING`), in `except` blocks, functions and classes. For `-m name` the module's file is looked for as Python
would, by its path alone; packages above it are not executed here either. A package that makes up its own `__path__`
is not found, and its groups start cold.

What is imported in advance is imported before the worker's RANK, FT_* and CUDA_VISIBLE_DEVICES are known. A module that
fails without them is imported again by the script; one that reads them at import and only falls back is the reason
to go without `--standby`.

Reads files; no torch, no threads.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ALWAYS = ("torch", "torch._dynamo")
"""Imported first, whether or not the script itself names it. torch imports the second one for the first optimizer that
is built: 800 modules, nearly a second."""
MAX_BYTES = 4 * 1024 * 1024
"""A script longer than this is not parsed."""
MAX_IMPORTS = 500
_NEVER = ("__future__", "__main__")


@dataclass(frozen=True)
class Preload:
    """What to import in advance, or why nothing can be."""

    imports: tuple[str, ...]
    """Absolute module names in order, each once."""
    names: tuple[str, ...] = ()
    """module:name for what is taken out of them."""
    reason: str = ""
    """Not empty: a standby is of no use for this script, and why."""


def plan(script: str, module: bool, no_python: bool) -> Preload:
    """What a standby for this script imports. Never raises for what the script is; see `Preload.reason`.

    Args:
        script: the path as given to ftrun, or a module's name.
        module: ftrun's -m.
        no_python: ftrun's --no-python.
    """
    if no_python:
        return Preload((), reason=f"--no-python: {script} is not run by Python")
    path, package = script, ""
    if module:
        found = _find(script)
        if found is None:
            return Preload((), reason=f"-m {script}: there is no such module in a .py file")
        path, package = found
    if not path.endswith(".py"):
        return Preload((), reason=f"{path} is not a .py file")
    try:
        with open(path, "rb") as file:
            source = file.read(MAX_BYTES + 1)
    except OSError as error:
        return Preload((), reason=f"{path} cannot be read: {error.strerror}")
    if len(source) > MAX_BYTES:
        return Preload((), reason=f"{path} is longer than {MAX_BYTES} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the worker shows them, when it runs the script
            tree = ast.parse(source, path)
    except SyntaxError as error:
        return Preload((), reason=f"{path} line {error.lineno}: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return Preload((), reason=f"{path} cannot be parsed: {error}")
    named = list(_imports(tree.body, package))
    modules = dict.fromkeys([*ALWAYS, *_parents(package), *(name for name in named if ":" not in name)])
    names = dict.fromkeys(name for name in named if ":" in name)
    return Preload(
        tuple(name for name in modules if name not in _NEVER)[:MAX_IMPORTS],
        tuple(name for name in names if name.partition(":")[0] not in _NEVER)[:MAX_IMPORTS],
    )


def _imports(body: Iterable[ast.stmt], package: str) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            name = _absolute(statement, package)
            if name:
                yield name
                yield from (f"{name}:{alias.name}" for alias in statement.names if alias.name != "*")
        elif isinstance(statement, ast.With):
            yield from _imports(statement.body, package)
        elif isinstance(statement, ast.Try):
            yield from _imports([*statement.body, *statement.orelse, *statement.finalbody], package)


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    """The module that is imported from; '' if it is relative and there is no package."""
    if not statement.level:
        return statement.module or ""
    try:
        return importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
    except ImportError:
        return ""


def _parents(package: str) -> Iterator[str]:
    """a.b -> a, a.b: what `-m a.b.c` executes before c."""
    parts = package.split(".") if package else []
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _find(name: str) -> tuple[str, str] | None:
    """The file that `-m name` would run, and the package it belongs to; nothing is executed."""
    top, *rest = name.split(".")
    for base in _homes(top):
        path = os.path.join(base, *rest)
        regular = os.path.isfile(os.path.join(path, "__init__.py"))
        if not regular and os.path.isfile(path + ".py"):
            return path + ".py", name.rpartition(".")[0]
        main = os.path.join(path, "__main__.py")
        if os.path.isfile(main):
            return main, name
    return None


def _homes(top: str) -> Iterator[str]:
    """Where the top-level module or package may live: paths without .py, as Python would try them."""
    here = os.path.join(os.getcwd(), top)  # what `-m` puts first
    if os.path.isfile(here + ".py") or os.path.isfile(os.path.join(here, "__init__.py")):
        yield here
        return
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None)
        if spec is not None:
            if spec.submodule_search_locations is not None:
                yield from list(spec.submodule_search_locations)
            elif spec.origin is not None and spec.origin.endswith(".py"):
                yield spec.origin.removesuffix(".py")
            break
    yield here  # a folder without __init__.py comes last

"""What is private to Accelerate and transformers is named in `ft_accelerate._compat` only."""

from __future__ import annotations

import ast
import pathlib

import ft_accelerate

HERE = pathlib.Path(ft_accelerate.__file__).parent
PUBLIC = {"accelerate", "accelerate.utils", "transformers"}
"""Modules whose names are the public API."""


def imported(path: pathlib.Path) -> set[str]:
    """Modules of the two packages that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
    return {name for name in found if name.partition(".")[0] in ("accelerate", "transformers")}


def test_private_names_are_imported_in_one_package_only() -> None:
    elsewhere = [path for path in HERE.rglob("*.py") if "_compat" not in path.parts]
    assert len(elsewhere) > 20
    assert {path.name: rest for path in elsewhere if (rest := imported(path) - PUBLIC)} == {}
    inside = set().union(*(imported(path) for path in (HERE / "_compat").glob("*.py")))
    assert "accelerate.data_loader" in inside

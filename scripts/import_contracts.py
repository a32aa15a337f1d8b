"""Two import-linter contract types that this project needs and import-linter lacks.

`allow_list` says what a module may import, where import-linter's own `forbidden` can only say what it may not: for
a pure module the list of harmless imports is short and the list of harmful ones has no end. `ban` is `forbidden`
for modules of which some may not exist yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from importlinter import Contract, ContractCheck, fields, output

if TYPE_CHECKING:
    from grimp import ImportGraph


def _names(field: object) -> list[str]:
    """A field as the contract's instances hold it: the class attribute describes the option, the instance its value."""
    return cast("list[str]", field)


def _existing(graph: ImportGraph, names: list[str]) -> list[str]:
    """The named modules that exist, each followed by its submodules."""
    found: list[str] = []
    for name in names:
        if name in graph.modules:
            found.append(name)
            if not graph.is_module_squashed(name):
                found.extend(sorted(graph.find_descendants(name)))
    return found


class AllowListContract(Contract):
    """Every direct import of `modules` (and their submodules) is of a module named in, or below one in, `allowed`."""

    type_name = "allow_list"
    modules = fields.ListField(subfield=fields.StringField())
    allowed = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        """Collect "importer -> imported" for every import that is not allowed."""
        allowed = _names(self.allowed)
        broken = [
            f"{module} -> {imported}"
            for module in _existing(graph, _names(self.modules))
            for imported in sorted(graph.find_modules_directly_imported_by(module))
            if not any(imported == name or imported.startswith(f"{name}.") for name in allowed)
        ]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print one line per import that is not allowed."""
        for line in check.metadata["broken"]:
            output.print_error(f"- {line} (not in this contract's `allowed` list)")
        output.new_line()


class BanContract(Contract):
    """No chain of imports leads from one of `modules` to one of `banned`; names that do not exist are skipped."""

    type_name = "ban"
    modules = fields.ListField(subfield=fields.StringField())
    banned = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        """Collect the shortest chain for every pair that is connected."""
        banned = _existing(graph, _names(self.banned))
        broken = [
            " -> ".join(chain)
            for module in _existing(graph, _names(self.modules))
            for target in banned
            if (chain := graph.find_shortest_chain(importer=module, imported=target)) is not None
        ]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each chain."""
        for line in check.metadata["broken"]:
            output.print_error(f"- {line}")
        output.new_line()

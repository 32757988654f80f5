"""Every public name is documented: it has a docstring and stands in the API reference, which names nothing else."""

import inspect
import re
import types
from pathlib import Path

import pytest

import ppleffects
import ppleffects.distributed
import ppleffects.effects
import ppleffects.errors

DOCS = Path(__file__).resolve().parent.parent / "docs"
MODULES = [ppleffects, ppleffects.distributed, ppleffects.effects, ppleffects.errors]


def public_names(module: types.ModuleType) -> set[str]:
    """The names that a module defines or exports, without its submodules and what `from __future__` leaves."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    members = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name for name, value in members.items() if not inspect.ismodule(value) and name != "annotations"}


def documented_names() -> dict[str, set[str]]:
    """What the API reference documents, by module; of a module documented as a whole, all its public names."""
    found: dict[str, set[str]] = {}
    current = ""
    for kind, argument in re.findall(r"^\.\. ([\w:]+):: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M):
        if kind == "currentmodule":
            current = argument
        elif kind == "automodule":
            found[argument] = public_names(next(m for m in MODULES if m.__name__ == argument))
        else:
            module, _, name = argument.rpartition(".")
            found.setdefault(module or current, set()).add(name)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module):
    assert documented_names()[module.__name__] == public_names(module)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_has_a_docstring(module):
    values = {name: getattr(module, name) for name in public_names(module)}
    bare = [name for name, v in values.items() if (inspect.isclass(v) or inspect.isroutine(v)) and not v.__doc__]
    assert bare == []


def test_every_page_is_in_the_contents():
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    contents = re.search(r"```\{toctree\}.*?\n\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.S)
    assert contents is not None
    assert set(contents[1].split()) == pages

"""The rules about the source: layers, cycles, jax's internals, sizes. Read from syntax trees, without importing it."""

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "ppleffects"
SOURCE = Path(__file__).resolve().parent.parent / PACKAGE
LAYERS = ["effects", "language", "interpretations", "transforms", "inference", "interop", "distributed"]  # lowest first
SHARED = ["errors"]  # open to every layer, and importing none
INTERNALS = ["jax._src", "jax.interpreters", "jaxlib"]
INTERNALS_IN = "effects/_jax.py"
MAX_FILE, MAX_FUNCTION = 600, 80  # lines
MAX_INTERNALS = 700  # it must be one file


@dataclass(frozen=True)
class Module:
    """One file: its dotted name, its path, its tree."""

    name: str
    path: Path
    is_package: bool
    tree: ast.Module
    lines: int

    @property
    def layer(self) -> str | None:
        """The sub-package or shared module it belongs to; None for the package's own `__init__`."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else None

    def at(self, node: ast.AST) -> str:
        """Where a node stands, for messages."""
        return f"{self.path.name}:{node.lineno}"


def parse(name: str, path: Path, text: str) -> Module:
    return Module(name, path, path.name == "__init__.py", ast.parse(text, str(path)), text.count("\n"))


def read_modules() -> dict[str, Module]:
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = parse(name, path, path.read_text(encoding="utf-8"))
    return modules


MODULES = read_modules()


def imported_names(module: Module) -> Iterator[tuple[str, str | None, ast.AST]]:
    """Every import, wherever it stands, as (module, name or None, node), with relative ones resolved."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = module.name.split(".")
                base = parts[: len(parts) - node.level + module.is_package]
                source = ".".join([*base, *filter(None, [source])])
            yield from ((source, alias.name, node) for alias in node.names)


def dependencies(module: Module, modules: dict[str, Module]) -> Iterator[tuple[str, ast.AST]]:
    """The modules of this package that a module imports, a name that is itself a module as that module."""
    for source, name, node in imported_names(module):
        if source.split(".")[0] == PACKAGE:
            whole = f"{source}.{name}"
            yield (whole if whole in modules else source), node


def upward_imports(module: Module, modules: dict[str, Module]) -> list[str]:
    """What a module imports from a layer above its own, from the package's top, or, if it is shared, from any layer."""
    if module.layer is None:
        return []
    height = {name: rank for rank, name in enumerate(LAYERS)} | dict.fromkeys(SHARED, -1)
    found = []
    for target, node in dependencies(module, modules):
        layer = target.split(".")[1] if "." in target else None
        if layer is None or height.get(layer, len(LAYERS)) > height.get(module.layer, len(LAYERS)):
            found.append(f"{module.at(node)} imports {target}")
    return found


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` of a chain of attributes on a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def internal_uses(module: Module) -> list[str]:
    """Imports and attribute chains that reach into jax's internals."""

    def is_internal(name: str) -> bool:
        listed = any(name == root or name.startswith(f"{root}.") for root in INTERNALS)
        first, *rest = name.split(".")
        return listed or (first == "jax" and any(part.startswith("_") and not part.endswith("__") for part in rest))

    names = [(source if name is None else f"{source}.{name}", node) for source, name, node in imported_names(module)]
    names += [(dotted(node), node) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    return [f"{module.at(node)} uses {name}" for name, node in names if name is not None and is_internal(name)]


def uses_of(identifier: str, module: Module) -> list[str]:
    """Places where a name is imported, read or taken as an attribute."""
    found = []
    for node in ast.walk(module.tree):
        aliases = [alias.name.split(".")[-1] for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
        if identifier in (getattr(node, "id", None), getattr(node, "attr", None), *aliases):
            found.append(module.at(node))
    return found


def asserts(module: Module) -> list[str]:
    return [module.at(node) for node in ast.walk(module.tree) if isinstance(node, ast.Assert)]


def long_functions(module: Module) -> list[str]:
    functions = [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(node, node.end_lineno - node.lineno + 1) for node in functions]
    return [f"{module.at(node)} {node.name}: {length}" for node, length in lengths if length > MAX_FUNCTION]


def find_cycle(modules: dict[str, Module]) -> list[str] | None:
    """A chain of modules that import each other, imports inside functions included.

    A package whose `__init__` gathers its own modules' names is no cycle as long as these do not import it back.
    """
    graph = {name: {target for target, _ in dependencies(module, modules)} for name, module in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


@pytest.fixture(params=MODULES.values(), ids=list(MODULES))
def module(request) -> Module:
    return request.param


def test_layers_are_known():
    found = {module.layer for module in MODULES.values()} - {None}
    assert found <= {*LAYERS, *SHARED}, "a new sub-package needs its place in LAYERS"


def test_imports_go_downwards(module):
    assert upward_imports(module, MODULES) == []


def test_no_cycles():
    assert find_cycle(MODULES) is None


def test_jax_internals_in_one_file(module):
    if module.path != SOURCE / INTERNALS_IN:
        assert internal_uses(module) == []


def test_no_pmap(module):
    assert uses_of("pmap", module) == []


def test_no_assert_reaches_a_user(module):
    assert asserts(module) == []


def test_sizes(module):
    assert module.lines <= (MAX_INTERNALS if module.path.match(INTERNALS_IN) else MAX_FILE), (
        "more than one idea in this file?"
    )
    assert long_functions(module) == []


# The checks themselves, on sources that break one rule each.


def broken(text: str, name: str = "ppleffects.language.site") -> Module:
    return parse(name, Path(name.split(".")[-1] + ".py"), text)


@pytest.mark.parametrize(
    "text",
    [
        "from ppleffects.inference import mcmc",
        "from ppleffects.interop.arviz import to_datatree",
        "import ppleffects.transforms",
        "from ..inference import mcmc",
        "from .. import inference",
        "from ppleffects import inference",
        "from ppleffects import sample",
        "import ppleffects as ppl",
        "def f():\n    from ppleffects.inference import mcmc",
        "if TYPE_CHECKING:\n    from ppleffects.inference import mcmc",
    ],
)
def test_upward_import_is_seen(text):
    above = {name: broken("", name) for name in ["ppleffects.inference", "ppleffects.transforms"]}
    assert len(upward_imports(broken(text), above)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from ppleffects.effects import Interpreter",
        "from ..effects import Interpreter",
        "from . import sample",
        "from ppleffects import errors",
        "from ppleffects.errors import PPLError",
        "import numpyro",
    ],
)
def test_downward_import_is_allowed(text):
    below = {name: broken("", name) for name in ["ppleffects.effects", "ppleffects.language", "ppleffects.errors"]}
    assert upward_imports(broken(text), below) == []


@pytest.mark.parametrize(
    "text",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax import _src",
        "from jax.interpreters import ad",
        "import jaxlib.xla_client",
        "import jax\njax._src.core",
        "import jax\njax.core._private",
    ],
)
def test_internals_are_seen(text):
    assert internal_uses(broken(text)) != []


@pytest.mark.parametrize(
    "text", ["import jax\njax.__version__", "from jax.extend import core", "import jax.numpy as jnp"]
)
def test_public_jax_is_allowed(text):
    assert internal_uses(broken(text)) == []


@pytest.mark.parametrize("text", ["jax.pmap(f)", "from jax import pmap", "pmap(f)"])
def test_pmap_is_seen(text):
    assert uses_of("pmap", broken(text)) != []


def test_cycle_is_seen():
    names = ["ppleffects.effects.a", "ppleffects.effects.b"]
    texts = ["from ppleffects.effects import b", "def f():\n    from .a import g"]
    cycle = find_cycle({name: broken(text, name) for name, text in zip(names, texts, strict=True)})
    assert cycle is not None
    assert set(cycle) == set(names)


def test_assert_and_long_function_are_seen():
    assert asserts(broken("def f(x):\n    assert x")) == ["site.py:2"]
    body = "\n".join(["    pass"] * MAX_FUNCTION)
    assert long_functions(broken(f"def f():\n{body}")) == [f"site.py:1 f: {MAX_FUNCTION + 1}"]

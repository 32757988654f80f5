"""The page of errors, run: each wrong program raises the error that is shown, each right one ends, and none is missing.

An entry of ``docs/errors.md`` is a heading with three fenced blocks: the wrong program, the message, the right program.
What stands before the first entry of the page, and of a section, is run before each of its entries.
"""

import ast
import builtins
import dataclasses
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

import ppleffects
from ppleffects import errors

pytestmark = pytest.mark.skipif(
    jax.device_count() < 4, reason="the page's mesh has four devices: set PPLEFFECTS_TEST_DEVICES=4"
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
PACKAGE = Path(ppleffects.__file__).resolve().parent
FILE = "model.py"  # what the programs of the page are called, in messages

# What makes an exception and has no entry: why.
NOT_ON_THE_PAGE = {
    "distributed.initialize": "needs processes that do not find each other, see tests/inference/test_processes.py",
    "effects._jax.bind_rules.fwd": "what JAX raises, for forward mode through a custom_vjp function",
    "effects.context.Part.enter": "an abstract method",
    "effects.context.Part.inside": "an abstract method",
    "effects.context.Part.leave": "an abstract method",
    "effects.context.Part.rejoin": "an abstract method",
    "inference.checkpoint.Checkpoint._check": "needs a run that was kept, see tests/inference/test_checkpoint.py",
    "inference.checkpoint.Checkpoint._hold": "needs another process, as above",
    "inference.checkpoint.Checkpoint._await": "needs several processes, see tests/inference/test_processes.py",
    "inference.checkpoint.Checkpoint._check_commit": "needs several processes, as above",
    "inference.checkpoint._read_saved: ValueError": "becomes a CheckpointError",
    "inference.checkpoint._valid": "becomes a CheckpointError",
    "inference.checkpoint._told": "needs a full disk, as above",
    "inference.checksum.check_same": "needs several processes, as above",
    "inference.kernel.Hamiltonian._trajectories": "an abstract method",
    "inference.kernel.Hamiltonian._transition": "an abstract method",
    "inference.kernel.Hamiltonian._transition_of_blackjax": "an abstract method",
    "inference.kernel.Hamiltonian.check: DiscreteLatentError": "ppl.target refuses first; for targets made elsewhere",
    "inference.placing._copy_from_devices": "needs several processes, see tests/inference/test_shard_rows.py",
    "inference.processes.together": "needs several processes, as above",
    "inference.run.Run._resume": "needs a run that was kept, see tests/inference/test_checkpoint.py",
    "inference.run.Run._check_density": "needs a run that was kept, see tests/inference/test_checkpoint.py",
    "inference.state_file._read_array: ValueError": "becomes a CheckpointError, as above",
    "inference.state_file.read": "needs a damaged file, as above",
    "inference.shard_rows._order_of_processes": "needs several processes, as above",
    "interop.tfp.__getattr__: AttributeError": "what Python asks of a module that does not have a name",
    "interpretations.rules._drawn: PPLError": "an invariant: values or a key are given, and values are checked first",
    "language.distribution.bijector: NotImplementedError": "becomes a DistributionError where the site is known",
    "language.distribution.feasible: NotImplementedError": "becomes a DistributionError where the site is known",
    "language.site.SiteParams.distribution": "an invariant: handlers ask only sites that have a distribution",
}


# --- the page ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """One error of the page.

    Attributes:
        title: its heading.
        before: programs to run before its own.
        wrong: the program that raises.
        error: name of the class.
        message: what the error says.
        right: the program that was meant; empty where it is a command of the shell.
        without: a library that the wrong program must not find.
    """

    title: str
    before: tuple[str, ...]
    wrong: str
    error: str
    message: str
    right: str
    without: str | None


_FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_ENTRY = re.compile(
    r"(?P<prose>[^`]*(?:`[^`]+`[^`]*)*)^```python\n(?P<wrong>.*?)^```\n\n`(?P<error>\w+)`:\n\n"
    r"^```text\n(?P<message>.*?)^```\n\n[^`]*(?:`[^`]+`[^`]*)*:\n\n"
    r"^```(?P<language>python|shell)\n(?P<right>.*?)^```\n*",
    re.M | re.S,
)


def read_page(text: str) -> list[Entry]:
    head, *sections = re.split(r"^## .*\n", text, flags=re.M)
    shared = tuple(_FENCE.findall(head))
    entries = []
    for section in sections:
        head, *rest = re.split(r"^### (.*)\n", section, flags=re.M)
        for title, body in zip(rest[::2], rest[1::2], strict=True):
            found = _ENTRY.fullmatch(body)
            if found is None:
                raise ValueError(f"'{title}' has not the form of an entry")
            without = re.search(r"^% without (\w+)$", found["prose"], re.M)
            entries.append(
                Entry(
                    title,
                    (*shared, *_FENCE.findall(head)),
                    found["wrong"],
                    found["error"],
                    found["message"],
                    found["right"] if found["language"] == "python" else "",
                    None if without is None else without[1],
                )
            )
    return entries


ENTRIES = read_page(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(params=ENTRIES, ids=lambda entry: entry.title)
def entry(request) -> Entry:
    return request.param


# --- running it -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Raised:
    """An error that a program raised, and the file and line of the package that made it."""

    error: errors.PPLError
    file: str
    line: int


def run(entry: Entry, program: str) -> None:
    namespace: dict[str, Any] = {"__name__": "model"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.DiagnosticsWarning)
        for code in entry.before:
            exec(compile(code, "before.py", "exec"), namespace)
        exec(compile(program, FILE, "exec"), namespace)


@functools.cache
def raised(entry: Entry) -> Raised | None:
    """Runs the wrong program of an entry, noting of each error where it is made."""
    made: dict[int, tuple[str, int]] = {}
    init = errors.PPLError.__init__

    def noting(self, *args, **kwargs):
        frame = sys._getframe(1)
        made[id(self)] = frame.f_code.co_filename, frame.f_lineno
        init(self, *args, **kwargs)

    with mock.patch.object(errors.PPLError, "__init__", noting), mock.patch.dict(sys.modules):
        if entry.without is not None:
            for name in [name for name in sys.modules if name.startswith(f"{entry.without}.")]:
                del sys.modules[name]  # another test may have imported it
            sys.modules[entry.without] = None
        try:
            run(entry, entry.wrong)
        except errors.PPLError as error:
            error.__cause__ = error.__context__ = error.__traceback__ = None  # whose frames hold tracers
            return Raised(error, *made[id(error)])
    return None


def all_raised() -> list[Raised]:
    return [found for found in map(raised, ENTRIES) if found is not None]


def says(shown: str, message: str) -> bool:
    """Whether a message is what is shown, where ``...`` stands for anything within a line."""
    return re.fullmatch(".*".join(map(re.escape, shown.rstrip("\n").split("..."))), message) is not None


def in_this_precision(shown: str) -> str:
    """A message of the page, written with 64 bits, as it is in 32: other types, other numbers that were drawn."""
    if jax.config.jax_enable_x64:
        return shown
    narrow = re.sub(r"\b(float|int)64\b", r"\g<1>32", re.sub(r"\bcomplex128\b", "complex64", shown))
    return re.sub(r"-?\d+\.\d+", "...", narrow)


def test_wrong_program(entry):
    found = raised(entry)
    assert found is not None, "it raises nothing"
    assert type(found.error).__name__ == entry.error
    assert says(in_this_precision(entry.message), str(found.error)), str(found.error)


def test_right_program(entry):
    run(entry, entry.right)


def test_message_says_where_and_what_to_do(entry):
    found = raised(entry)
    assert found is not None
    text, site = str(found.error), found.error.site
    assert [row for row in ("expected", "found", "fix") if f"\n  {row}: " not in text] == []
    assert not re.search(r"unknown line|before\.py|<string>", text)
    absent = re.search(r"has no latent of this name|names a site that .* does not have", text)
    if site is not None and not absent:
        lines = [int(line) for line in re.findall(rf"\b{re.escape(FILE)}:(\d+)", text)]
        assert text.startswith(f"site '{site}' at {FILE}:")
        assert lines
        assert max(lines) <= len(entry.wrong.splitlines())


def test_titles_differ():
    assert len({entry.title for entry in ENTRIES}) == len(ENTRIES)


# --- completeness -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Made:
    """A place in the package where an exception is made.

    Attributes:
        function: module and function.
        error: name of the class.
        file: the module's file.
        first: first line of the expression.
        last: last line of it.
    """

    function: str
    error: str
    file: str
    first: int
    last: int

    def __contains__(self, found: Raised) -> bool:
        return found.file == self.file and self.first <= found.line <= self.last

    @property
    def is_exempt(self) -> bool:
        return not {self.function, f"{self.function}: {self.error}"}.isdisjoint(NOT_ON_THE_PAGE)


def named(node: ast.AST | None, names: dict[str, Any]) -> Any:
    """What a name, or a chain of attributes on one, stands for; None for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, getattr(builtins, node.id, None))
    return getattr(named(node.value, names), node.attr, None) if isinstance(node, ast.Attribute) else None


def exceptions_made(node: ast.AST, names: dict[str, Any], function: str, file: str) -> Iterator[Made]:
    """Every call of an exception's class, and every class that is raised as it is."""
    for child in ast.iter_child_nodes(node):
        maker = child.func if isinstance(child, ast.Call) else child.exc if isinstance(child, ast.Raise) else None
        cls = named(maker, names)
        if isinstance(cls, type) and issubclass(cls, Exception):
            yield Made(function, cls.__name__, file, child.lineno, child.end_lineno or child.lineno)
        inner = f"{function}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else function
        yield from exceptions_made(child, names, inner, file)


@functools.cache
def package_exceptions() -> tuple[Made, ...]:
    found: list[Made] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        names = vars(importlib.import_module(f"ppleffects.{module}".removesuffix(".__init__")))
        found += exceptions_made(ast.parse(path.read_text(encoding="utf-8")), names, module, str(path))
    return tuple(found)


def test_every_error_is_on_the_page():
    shown = all_raised()
    missing = [m for m in package_exceptions() if not m.is_exempt and not any(found in m for found in shown)]
    assert [f"{m.function}: {m.error}, line {m.first}" for m in missing] == []


def test_what_is_not_on_the_page_is_there_and_unseen():
    exempt = [m for m in package_exceptions() if m.is_exempt]
    assert {m.function for m in exempt} == {key.split(":")[0] for key in NOT_ON_THE_PAGE}
    assert [m for m in exempt if any(found in m for found in all_raised())] == []


def test_every_class_has_an_entry():
    classes = {name for name, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.PPLError)}
    assert {entry.error for entry in ENTRIES} == classes


# The checks themselves, on a module and a page that break them.


def test_an_exception_without_an_entry_is_seen():
    source = """
def f():
    raise ValueError("x")

class A:
    def g(self):
        return errors.ShapeError(
            "y"
        )

    def h(self):
        warn("z", UserWarning)
        raise TypeError
"""
    made = exceptions_made(ast.parse(source), {"errors": errors}, "m", "m.py")
    places = [("m.f", "ValueError", 3, 3), ("m.A.g", "ShapeError", 7, 9), ("m.A.h", "TypeError", 13, 13)]
    assert [(m.function, m.error, m.first, m.last) for m in made] == places


def test_an_entry_that_is_none_is_seen():
    with pytest.raises(ValueError, match="'An error' has not the form of an entry"):
        read_page("# Errors\n\n## Theme\n\n### An error\n\nProse alone.\n")


def test_a_program_that_raises_nothing_and_another_message_are_seen():
    assert raised(Entry("", (), "pass", "PPLError", "", "", None)) is None
    assert says("found: ...\n  fix: this", "found: that\n  fix: this")
    assert not says("found: ...\n  fix: this", "found: that\n  fix: that")
    assert not says("found: ...", "found: that\n  fix: this")

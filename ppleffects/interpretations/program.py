"""A traced model: its equations, its sites, and the compiled interpretations of it, found by its structure."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np

from ppleffects.effects import _jax, lift_constants, mesh, structure_of, tracing
from ppleffects.errors import MeshError, PPLError
from ppleffects.interpretations.check import check_sites
from ppleffects.interpretations.layout import Occurrence, occurrences


class Program:
    """The static half of a traced model; hashable, and equal to every program of the same equations.

    Attributes:
        jaxpr: the equations; constants and arguments are inputs.
        out_tree: the tree of the model's return value.
        sites: where the sites stand, in order.
        label: the model's name, for messages.
    """

    def __init__(self, jaxpr: _jax.Jaxpr, out_tree: Any, label: str):
        self.jaxpr, self.out_tree, self.label = jaxpr, out_tree, label
        self.sites: tuple[Occurrence, ...] = occurrences(jaxpr)
        check_sites(self.sites)

    @functools.cached_property
    def _structure(self) -> Any:
        return (structure_of(self.jaxpr), self.out_tree)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._structure)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and (self is other or self._structure == other._structure)

    @property
    def mesh(self) -> Any:
        """The mesh of the first shard_map around a site; None if there is none."""
        for occurrence in self.sites:
            for position in occurrence.shards:
                return occurrence.path[position].eqn.params["mesh"]
        return None

    def named(self, *kinds: str) -> dict[str, Occurrence]:
        """The sites of some kinds by name; of branches that share a name, the first."""
        found: dict[str, Occurrence] = {}
        for occurrence in self.sites:
            if occurrence.kind in kinds:
                found.setdefault(occurrence.site.name, occurrence)
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """A program with the arrays that it runs on.

    Attributes:
        program: the equations and sites.
        consts: the arrays that the model closed over.
        args: its array arguments, flat.
    """

    program: Program = dataclasses.field(metadata={"static": True})
    consts: tuple[Any, ...]
    args: tuple[Any, ...]


def trace_model(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *given: Any, part: bool = False
) -> Model:
    """Traces a model once; arrays and floats among the arguments are traced, everything else is static.

    Args:
        model: the function.
        args: its arguments.
        kwargs: its named arguments.
        given: what its interpretation is given besides (values of latents, a key).
        part: whether the model is a part of one that is being traced, so that mesh axes around it are the model's own.

    Raises:
        PPLError: the model is not callable, or a static argument cannot be hashed.
        DuplicateSiteError, SpecError, UnsupportedPrimitiveError: see ``check_sites``.
    """
    if not callable(model):
        raise PPLError(
            "the model is not a function",
            expected="a function that calls ppl.sample and ppl.observe",
            found=f"{type(model).__name__}",
            fix="write ppl.log_density(model)(values, *args), not ppl.log_density(model(*args))",
        )
    label = getattr(model, "__name__", type(model).__name__)
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [_is_dynamic(leaf) for leaf in leaves]
    for leaf, d in zip(leaves, dynamic, strict=True):
        if not d and not isinstance(leaf, Hashable):
            raise PPLError(
                f"an argument of '{label}' is neither an array nor hashable",
                expected="an array, a number, a pytree of them, or a hashable object",
                found=f"{type(leaf).__module__}.{type(leaf).__qualname__}",
                fix="register its class as a pytree, or convert it to arrays",
            )

    def run(*arrays):
        rest = iter(arrays)
        args, kwargs = jax.tree.unflatten(tree, [next(rest) if d else x for x, d in zip(leaves, dynamic, strict=True)])
        return model(*args, **kwargs)

    arrays = tuple(leaf for leaf, d in zip(leaves, dynamic, strict=True) if d)
    around = frozenset().union(*(_jax.varying(x) for x in jax.tree.leaves((arrays, given)) if isinstance(x, jax.Array)))
    context = mesh.ambient_axes(tuple(sorted(around))) if around and not part else contextlib.nullcontext()
    with context, _told_of_rows(label):
        traced, arrays = lift_constants(tracing.trace(run, *arrays), arrays)
    program = Program(_jax.without_constants(traced.jaxpr), traced.out_tree, label)
    return Model(program, traced.consts, arrays)


@contextlib.contextmanager
def _told_of_rows(label: str) -> Iterator[None]:
    """Says what to do where JAX says that rows do not divide."""
    try:
        yield
    except ValueError as error:
        found = next((line for line in str(error).splitlines() if "does not evenly divide" in line), None)
        if found is None or isinstance(error, PPLError):
            raise
        raise MeshError(
            f"the rows of an array that '{label}' gives to shard_map do not divide over the mesh axis",
            source=_jax.raised_line(error),
            expected="a number of rows that the size of the mesh axis divides",
            found=found.strip().removeprefix("* "),
            fix="ppl.shard_rows appends rows up to the next multiple, and masks them",
        ) from error


def _is_dynamic(leaf: Any) -> bool:
    if isinstance(leaf, bool | int | str):
        return False
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | float | complex)


def bind_arguments(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The model's arguments by the names of its parameters, as far as its signature is known."""
    try:
        bound = inspect.signature(model).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return dict(kwargs)
    return dict(bound.arguments)


_compiled: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
_MAX_COMPILED = 256


def compiled(build: Callable[..., Callable[..., Any]], program: Program, *static: Hashable) -> Callable[..., Any]:
    """Returns ``jax.jit(build(program, *static))``, the same one for every program of the same structure.

    Data are arguments of what ``build`` returns, so that one compilation serves all data of one shape.
    """
    key = (build, program, *static)
    if key in _compiled:
        _compiled.move_to_end(key)
    else:
        _compiled[key] = jax.jit(build(program, *static), inline=True)
        if len(_compiled) > _MAX_COMPILED:
            _compiled.popitem(last=False)
    return _compiled[key]

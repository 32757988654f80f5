"""Runs a traced model under one interpretation, with its given values checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ppleffects.errors import DTypeError, ShapeError, ValuesError
from ppleffects.interpretations.layout import Occurrence
from ppleffects.interpretations.parts import Context, Draws, Inputs, Records, Totals
from ppleffects.interpretations.program import Model, Program, compiled
from ppleffects.interpretations.rules import GIVEN, Reading, interpreter
from ppleffects.language.arguments import as_mapping


def run(
    model: Model,
    values: Mapping[str, Array],
    *,
    key: Array | None = None,
    record: bool = True,
    reading: Reading = GIVEN,
) -> tuple[Any, Context]:
    """Interprets a model; returns what it returns, and the context after its last equation.

    Args:
        model: program and data.
        values: values of latents by name; those that are absent are drawn.
        key: a typed key, if any is absent.
        record: whether sites write records.
        reading: how the values are meant.
    """
    return compiled(_build, model.program, record, reading)(dict(values), key, model.consts, model.args)


def _build(program: Program, record: bool, reading: Reading) -> Callable[..., Any]:
    interpret = interpreter(reading, program.label)

    def call(values, key, consts, args):
        ctx = Context(
            Inputs(values),
            None if key is None else Draws(key),
            Records({}) if record else None,
            Totals({}),
        )
        outs, ctx = interpret.run(program.jaxpr, consts, ctx, *args)
        return jax.tree.unflatten(program.out_tree, outs), ctx

    return call


def checked_values(
    program: Program,
    values: Mapping[str, Any],
    *,
    partial: bool = False,
    kinds: tuple[str, ...] = ("sample",),
    unconstrained: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Array]:
    """Checks that ``values`` names every latent and nothing else, with the shape and a dtype of each.

    Args:
        program: the traced model.
        values: values by name.
        partial: whether some may be left out.
        kinds: the kinds of sites that may be named.
        unconstrained: the shapes of the values, if they are unconstrained ones.

    Raises:
        ValuesError: a name is missing, unknown or observed.
        ShapeError: a value has another shape than its site.
        DTypeError: a cast to the site's dtype would lose.
    """
    values = as_mapping(values, "values")
    latents = program.named(*kinds)
    for name in values:
        if name not in latents:
            raise _unknown(program, name)
    missing = [] if partial else [o for name, o in latents.items() if name not in values]
    if missing:
        raise ValuesError(
            "no value is given for this latent" + (f", nor for {len(missing) - 1} others" if missing[1:] else ""),
            site=missing[0].site.name,
            source=missing[0].site.source,
            expected=f"a value for each of {sorted(latents)}",
            found=f"values for {sorted(values)}",
            fix=f'values["{missing[0].site.name}"] = ..., or ppl.simulate, which draws it'
            if unconstrained is None
            else "Target.init(key) draws a position, Target.unconstrain(values) makes one from values",
        )
    shapes = {name: latents[name].layout()[0] for name in values} if unconstrained is None else unconstrained
    return {name: _checked(latents[name], value, shapes[name]) for name, value in values.items()}


def _unknown(program: Program, name: str) -> ValuesError:
    others = program.named("observe", "deterministic", "factor")
    if name in others:
        found = others[name]
        fixes = {
            "observe": f'ppl.condition(model, {{"{name}": value}}) fixes a latent; the value of an observation is the '
            "model's own argument",
            "deterministic": "leave it out: it is computed",
            "factor": "leave it out: it has no value",
        }
        return ValuesError(
            f"a value is given for a site of kind '{found.kind}', which takes none",
            site=name,
            source=found.site.source,
            expected="values of latents, and of nothing else",
            found=f"a value for '{name}'",
            fix=fixes[found.kind],
        )
    latents = list(program.named("sample"))
    close = difflib.get_close_matches(name, latents, 1)
    return ValuesError(
        f"the model '{program.label}' has no latent of this name",
        site=name,
        expected=f"one of {latents}" if latents else "no values, since the model has no latents",
        found=f"a value for '{name}'",
        fix=f"did you mean '{close[0]}'?" if close else "leave it out",
    )


def _checked(occurrence: Occurrence, value: Any, shape: tuple[int, ...]) -> Array:
    site = occurrence.site
    value = as_numbers(value, site.name, site.source)
    if jnp.shape(value) != shape:
        raise ShapeError(
            "the value does not have the shape of its site",
            site=site.name,
            source=site.source,
            expected=f"{shape}" + (f", inside {' > '.join(map(str, occurrence.path))}" if occurrence.path else ""),
            found=f"{jnp.shape(value)}",
            fix="one leading axis for each scan around the site, then one for each vmap, then batch and event axes",
        )
    return cast(value, occurrence.dtype, site.name, site.source)


def as_numbers(value: Any, site: str, source: str) -> Any:
    """Returns a value of a site as an array or a number of Python's.

    Raises:
        DTypeError: it is none.
    """
    if isinstance(value, jax.Array | int | float | complex):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "biufcV":
        raise DTypeError(
            "the value is no array of numbers",
            site=site,
            source=source,
            expected="a number, an array, or lists of numbers",
            found=f"{array.dtype}",
            fix="give one array for each latent",
        )
    return array


def cast(value: Any, dtype: Any, site: str, source: str) -> Array:
    """Returns a value in the dtype of its site.

    Raises:
        DTypeError: the cast would lose.
    """
    given = jnp.result_type(value)
    if _loses(given, dtype, isinstance(value, int | float)):
        raise DTypeError(
            "a cast to the dtype of the site would lose",
            site=site,
            source=source,
            expected=f"{dtype}",
            found=f"{given}",
            fix=f"cast it yourself: jnp.asarray(value, '{dtype}')",
        )
    return jnp.asarray(value, dtype)


def _loses(given: Any, wanted: Any, is_python: bool) -> bool:
    """Whether a cast goes to a lower kind of number, or a narrower type of its kind; Python numbers have no width."""
    order = [jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating]

    def rank(dtype):
        return next((i for i, kind in enumerate(order) if jnp.issubdtype(dtype, kind)), len(order))

    if rank(given) != rank(wanted):
        return rank(given) > rank(wanted)
    return not is_python and jnp.promote_types(given, wanted) != wanted

"""What a user gives: arrays, names and dicts, checked, or an error that says what was meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ppleffects.effects import _jax
from ppleffects.errors import DTypeError, ValuesError


def as_array(value: Any, what: str, site: str | None = None) -> Array:
    """Returns an argument as an array.

    Args:
        value: the argument.
        what: what it is called in messages.
        site: name of the site that it is given to, if it is given to one.

    Raises:
        DTypeError: it is none.
    """
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise DTypeError(
            f"the {what} is no array of numbers",
            site=site,
            source=_jax.current_line(),
            expected="a number, an array, or lists of numbers",
            found=f"{type(value).__name__}",
            fix="give one array; each site has its own",
        ) from error


def as_real(value: Any, what: str, site: str | None = None) -> Array:
    """Returns an argument as an array of real numbers.

    Raises:
        DTypeError: it is none.
    """
    array = as_array(value, what, site)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise DTypeError(
            f"the {what} is complex",
            site=site,
            source=_jax.current_line(),
            expected="real numbers, as a log-density is",
            found=f"{array.dtype}",
            fix="jnp.real(...), if the imaginary part is meant to be dropped",
        )
    return array


def as_booleans(value: Any, what: str, site: str | None = None) -> Array:
    """Returns an argument as an array of booleans.

    Raises:
        DTypeError: it is none. Numbers are not taken for booleans: they may be indices or weights.
    """
    array = as_array(value, what, site)
    if array.dtype != bool:
        raise DTypeError(
            f"the {what} is not boolean",
            site=site,
            source=_jax.current_line(),
            expected="an array of bools",
            found=f"{array.dtype}",
            fix="compare it, as in weights > 0; weights themselves are for ppl.scale",
        )
    return array


def as_names(value: Any, what: str, site: str | None = None, *, optional: bool = False) -> tuple[str, ...]:
    """Returns a sequence of names; a string is one name.

    Args:
        value: the argument.
        what: how it is written in a call, as in ``"dims="``.
        site: name of the site that it is given to, if it is given to one.
        optional: whether None may stand for a name.

    Raises:
        ValuesError: it is no sequence of names.
    """
    names = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not all(isinstance(name, str) or (optional and name is None) for name in names):
        raise ValuesError(
            f"{what} is no sequence of names",
            site=site,
            source=_jax.current_line(),
            expected=f'{what}("a", "b"), or {what}"a" for one',
            found=f"{value!r}",
            fix="give strings",
        )
    return names


def as_mapping(value: Any, what: str) -> Mapping[str, Any]:
    """Returns a dict from names to something.

    Raises:
        ValuesError: it is no dict, or a key is no string.
    """
    if not isinstance(value, Mapping):
        raise ValuesError(
            f"{what} must be a dict",
            source=_jax.current_line(),
            expected="a dict from names",
            found=f"{type(value).__name__}",
            fix='write {"x": ...}',
        )
    for name in value:
        if not isinstance(name, str):
            raise ValuesError(
                f"{what} must be a dict whose keys are names",
                source=_jax.current_line(),
                expected="strings",
                found=f"{name!r}",
                fix='write {"x": ...}',
            )
    return value

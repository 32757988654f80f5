"""The distribution protocol: what a site needs of a distribution, and how NumPyro's, TFP's and your own provide it.

A distribution is a pytree whose array leaves are its parameters. Your own needs ``batch_shape``, ``event_shape``,
``dtype``, ``support`` (a NumPyro constraint), ``sample(key, sample_shape)`` and ``log_prob(value)``.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions.transforms import biject_to

from ppleffects.errors import DistributionError


@runtime_checkable
class Distribution(Protocol):
    """What ``sample`` and ``observe`` accept: a registered pytree with these members.

    It may also have ``dtype``, the dtype of a draw (else it is found from the parameters), and ``support``, a
    constraint of ``numpyro.distributions.constraints``, which samplers need to make a latent unconstrained.

    Attributes:
        batch_shape: shape of independent, not necessarily identical draws.
        event_shape: shape of one draw.
    """

    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Returns draws of shape ``(*sample_shape, *batch_shape, *event_shape)``."""
        ...

    def log_prob(self, value: Array) -> Array:
        """Returns the log density or mass, with the event axes summed."""
        ...


class Bijector(Protocol):
    """From unconstrained reals to the support of a distribution, on one batch of events."""

    def forward(self, u: Array) -> tuple[Array, Array]:
        """Returns the constrained value and the log-determinant of the Jacobian, event axes summed."""
        ...

    def inverse(self, value: Array) -> Array:
        """Returns the unconstrained value."""
        ...


@dataclasses.dataclass(frozen=True)
class Structure:
    """The static half of a distribution: its tree, and those of its leaves that are no arrays.

    Attributes:
        tree: the pytree structure.
        order: which leaf of the tree comes first, second, and so on: in each process the same.
        static: for each leaf, the leaf itself if it is no array, else None.
        dynamic: for each leaf, whether it is an array.
        names: for each array, what the distribution calls it; for messages.
        hidden: how many more arrays the distribution keeps among what its pytree calls static.
        own: for a class of the user's own, an object that equals no other: its methods may read what can change, so
            that no program is taken for another one's.
    """

    tree: Any
    order: tuple[int, ...] = dataclasses.field(repr=False)
    static: tuple[Any, ...]
    dynamic: tuple[bool, ...]
    names: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    hidden: int = 0
    own: object = None

    @property
    def num_arrays(self) -> int:
        """The number of arrays that the distribution is put together from."""
        return sum(self.dynamic) + self.hidden

    def build(self, arrays: Any) -> Any:
        """Puts the distribution together from its arrays."""
        arrays = list(arrays)
        rest = iter(arrays)
        leaves = [next(rest) if d else s for s, d in zip(self.static, self.dynamic, strict=True)]
        found = dict(zip(self.order, leaves, strict=True))
        distribution = jax.tree.unflatten(self.tree, [found[i] for i in range(len(leaves))])
        return _revealed(distribution, arrays[sum(self.dynamic) :]) if self.hidden else distribution


@dataclasses.dataclass(frozen=True)
class _Hidden:
    """Stands for an array that a NumPyro distribution keeps among what its pytree calls static."""

    number: int


def _concealed(distribution: Any, arrays: list[Any]) -> Any:
    """A copy of a NumPyro distribution whose static fields hold no arrays; they are appended to ``arrays``."""
    if not isinstance(distribution, dist.Distribution):
        return distribution
    changed: dict[str, Any] = {}
    static = type(distribution).gather_pytree_aux_fields()
    for name, value in vars(distribution).items():
        if isinstance(value, dist.Distribution):
            inner = _concealed(value, arrays)
            if inner is not value:
                changed[name] = inner
        elif name in static and isinstance(value, jax.Array | np.ndarray):
            changed[name] = _Hidden(len(arrays))
            arrays.append(value)
    return _with_attributes(distribution, changed)


def _revealed(distribution: Any, arrays: list[Any]) -> Any:
    """The inverse of ``_concealed``."""
    changed: dict[str, Any] = {}
    for name, value in vars(distribution).items():
        if isinstance(value, _Hidden):
            changed[name] = arrays[value.number]
        elif isinstance(value, dist.Distribution):
            changed[name] = _revealed(value, arrays)
    return _with_attributes(distribution, changed)


def _with_attributes(distribution: Any, changed: dict[str, Any]) -> Any:
    if not changed:
        return distribution
    copied = copy.copy(distribution)
    vars(copied).update(changed)
    return copied


class _Position:
    """Stands for a leaf of a tree."""

    def __init__(self, index: int):
        self.index = index


def _order(tree: Any) -> tuple[int, ...]:
    """The leaves of a NumPyro distribution by the names of its attributes, whose own order differs between processes.

    In a program whose order differs, a compilation cache on disk would find nothing.
    """

    def walk(value: Any) -> list[int]:
        if isinstance(value, dist.Distribution):
            return [index for _, inner in sorted(vars(value).items()) for index in walk(inner)]
        return [leaf.index for leaf in jax.tree.leaves(value) if isinstance(leaf, _Position)]

    order = walk(jax.tree.unflatten(tree, map(_Position, range(tree.num_leaves))))
    # Only a class that puts itself together in a way of its own hides some from the walk.
    return tuple(order) if sorted(order) == list(range(tree.num_leaves)) else tuple(range(tree.num_leaves))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex) and not isinstance(leaf, bool)


def take_apart(distribution: Any, site: str, source: str) -> tuple[list[Any], Structure]:
    """Splits a distribution into its array leaves and its static structure.

    Raises:
        DistributionError: it is no pytree, or lacks a member of the protocol.
    """
    hidden: list[Any] = []
    leaves, tree = jax.tree.flatten(_concealed(distribution, hidden))
    order = _order(tree) if isinstance(distribution, dist.Distribution) else tuple(range(len(leaves)))
    leaves = [leaves[i] for i in order]
    if jax.tree_util.all_leaves([distribution]):
        raise DistributionError(
            f"the distribution is not a pytree, so its parameters cannot be traced: {type(distribution).__name__}",
            site=site,
            source=source,
            expected="a NumPyro distribution, a TFP distribution (JAX substrate), or a registered pytree with the "
            "members batch_shape, event_shape, dtype, support, sample and log_prob",
            found=f"an object of type {type(distribution).__module__}.{type(distribution).__qualname__}",
            fix="register its class with jax.tree_util.register_dataclass, parameters as data_fields",
        )
    missing = [m for m in ("batch_shape", "event_shape", "sample", "log_prob") if not hasattr(distribution, m)]
    if missing:
        raise DistributionError(
            "the object given as a distribution lacks members of the protocol",
            site=site,
            source=source,
            expected="batch_shape, event_shape, sample and log_prob",
            found=f"{type(distribution).__name__} without {', '.join(missing)}",
            fix="write ppl.sample(name, distribution), in this order",
        )
    dynamic = tuple(map(_is_array, leaves))
    static = tuple(None if d else leaf for leaf, d in zip(leaves, dynamic, strict=True))
    try:
        hash((static, tree))
    except TypeError as error:
        raise DistributionError(
            "a leaf of the distribution is neither an array nor hashable",
            site=site,
            source=source,
            expected="parameters that are arrays, and anything else hashable",
            found=f"{error}",
            fix="make it an array, or hashable, as a frozenset is in place of a set",
        ) from None
    arrays = [*(leaf for leaf, d in zip(leaves, dynamic, strict=True) if d), *hidden]
    names = tuple(_leaf_names(distribution, arrays))
    own = None if _is_of_a_library(distribution) else object()
    return arrays, Structure(tree, order, static, dynamic, names, len(hidden), own)


def _is_of_a_library(distribution: Any) -> bool:
    """Whether the class of a distribution, and those of the distributions it wraps, are NumPyro's or TFP's own."""
    if not type(distribution).__module__.startswith(("numpyro.", "tensorflow_probability.")):
        return False
    inner = [v for v in getattr(distribution, "__dict__", {}).values() if isinstance(v, dist.Distribution)]
    return all(map(_is_of_a_library, inner))


def _leaf_names(distribution: Any, arrays: list[Any]) -> list[str]:
    """Finds each leaf among the distribution's attributes, and among those of the distributions that it wraps."""
    known: dict[int, str] = {}
    owner = distribution
    while owner is not None:
        known = {**{id(value): name for name, value in getattr(owner, "__dict__", {}).items()}, **known}
        owner = getattr(owner, "__dict__", {}).get("base_dist")
    return [known.get(id(leaf), f"parameter {i}").strip("_") for i, leaf in enumerate(arrays)]


def is_tfp(distribution: Any) -> bool:
    """Whether a distribution comes from TensorFlow Probability; the library itself is not imported."""
    return any(c.__module__.startswith("tensorflow_probability") for c in type(distribution).__mro__)


def event_shape(distribution: Any) -> tuple[int, ...]:
    """The shape of one event."""
    return tuple(distribution.event_shape)


def shape(distribution: Any) -> tuple[int, ...]:
    """The shape of one draw: batch shape, then event shape."""
    return (*distribution.batch_shape, *distribution.event_shape)


def dtype(distribution: Any) -> Any:
    """The dtype of a draw, from the distribution's own word, its support or its parameters; nothing is sampled."""
    own = getattr(distribution, "dtype", None)
    if own is not None:
        return jax.dtypes.canonicalize_dtype(own)
    if isinstance(distribution, dist.Delta):
        return jnp.result_type(distribution.v)
    if is_discrete(distribution):
        return jnp.result_type(int)
    arrays = filter(_is_array, jax.tree.leaves(distribution))
    floats = [x for x in arrays if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    return jnp.result_type(float, *floats) if not floats else jnp.result_type(*floats)


def is_discrete(distribution: Any) -> bool:
    """Whether the distribution has a mass function rather than a density."""
    if is_tfp(distribution):
        return not jnp.issubdtype(distribution.dtype, jnp.floating)
    try:
        return bool(distribution.support.is_discrete)
    except (AttributeError, NotImplementedError):
        own = getattr(distribution, "dtype", None)
        return own is not None and not jnp.issubdtype(own, jnp.floating)


def support(distribution: Any) -> Any:
    """The set of values with positive density, as the distribution describes it, or None."""
    return getattr(distribution, "support", None)


def sample(distribution: Any, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
    """Draws from any distribution; TFP takes the key as ``seed=``."""
    if is_tfp(distribution):
        return distribution.sample(sample_shape, seed=key)
    return distribution.sample(key, sample_shape)


def log_prob(distribution: Any, value: Array, *, inside: bool = False) -> Array:
    """The log density of ``value``, with one entry for each event: ``-inf`` outside of the support.

    Args:
        distribution: any distribution.
        value: batch axes, then event axes.
        inside: whether ``value`` is known to lie in the support, so that it need not be checked.
    """
    density = distribution.log_prob(value)
    constraint = support(distribution)
    if inside or is_tfp(distribution) or _accepts_all(constraint, value):
        return density
    return jnp.where(constraint(value), density, -jnp.inf)


def _accepts_all(constraint: Any, value: Array) -> bool:
    """Whether every number of this dtype satisfies a constraint."""
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    if constraint is None or dist.constraints.is_dependent(constraint) or constraint == dist.constraints.real:
        return True
    return value.dtype == jnp.bool_ and constraint == dist.constraints.boolean


@dataclasses.dataclass(frozen=True)
class _NumpyroBijector:
    transform: Any
    event_dim: int

    def forward(self, u):
        value = self.transform(u)
        log_det = self.transform.log_abs_det_jacobian(u, value)
        extra = self.event_dim - self.transform.codomain.event_dim
        return value, log_det.sum(tuple(range(-extra, 0))) if extra > 0 else log_det

    def inverse(self, value):
        return self.transform.inv(value)


@dataclasses.dataclass(frozen=True)
class _TfpBijector:
    bijector: Any
    event_dim: int

    def forward(self, u):
        # The number of event axes is given on the unconstrained side, which may differ (a Cholesky factor).
        extra = self.event_dim - self.bijector.forward_min_event_ndims
        ndims = max(self.bijector.inverse_event_ndims(self.event_dim), 0) if extra >= 0 else self.event_dim
        return self.bijector.forward(u), self.bijector.forward_log_det_jacobian(u, event_ndims=ndims)

    def inverse(self, value):
        return self.bijector.inverse(value)


def bijector(distribution: Any) -> Bijector:
    """The default map from unconstrained reals onto the support of a distribution.

    NumPyro: ``biject_to(support)``. TFP: ``experimental_default_event_space_bijector()``.

    Raises:
        NotImplementedError: neither is known for this support.
    """
    event_dim = len(distribution.event_shape)
    if is_tfp(distribution):
        return _TfpBijector(distribution.experimental_default_event_space_bijector(), event_dim)
    constraint = support(distribution)
    if constraint is None:
        raise NotImplementedError
    return _NumpyroBijector(biject_to(constraint), event_dim)


def feasible(distribution: Any, value: Array) -> Array:
    """A point of the support, of the shape and dtype of ``value``; what a masked entry is replaced by.

    Raises:
        NotImplementedError: the support is not known.
    """
    if is_tfp(distribution):
        unconstrained = jax.eval_shape(bijector(distribution).inverse, value)
        zeros = jnp.zeros(unconstrained.shape, unconstrained.dtype)
        return jnp.asarray(bijector(distribution).forward(zeros)[0], value.dtype)
    constraint = support(distribution)
    if constraint is None:
        raise NotImplementedError
    return jnp.broadcast_to(jnp.asarray(constraint.feasible_like(value), value.dtype), value.shape)

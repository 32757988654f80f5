"""``blocked``: a likelihood over rows, added up over blocks of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, override

import jax
import numpy as np

from ppleffects.effects import Lane, _jax, activated, effect_primitive, lift_constants, structure_of, tracing
from ppleffects.effects._jax import Jaxpr
from ppleffects.errors import PPLError, ShapeError, SpecError
from ppleffects.language.arguments import as_array

CACHED_BYTES = 2**20  # on a CPU a block stays in the cache of a core
LARGE_BYTES = 2**26  # elsewhere it must fill the device


def blocked(likelihood: Callable[..., Any], rows: int | None = None) -> Callable[..., None]:
    """A likelihood of independent rows, computed for a block of rows at a time.

    Returns ``(data, *args, **kwargs) -> None``. It means what ``likelihood(data, *args, **kwargs)`` means: the same
    sites, values, draws and density. The density is added up over blocks of rows, and the gradient beside it, in one
    pass over the data: ``log p = sum over blocks of log p(block)``, ``d log p = sum over blocks of d log p(block)``. So
    what is computed on the way is held for one block alone, and a block stays in the cache.

    Inside of ``jax.shard_map`` each shard has blocks of its own rows. Chains that are vectorised share the blocks.
    ``simulate`` and ``evaluate``, whose results have an entry for each row, run all rows at once.

    Args:
        likelihood: ``(block, *args, **kwargs)``, where ``block`` is ``data`` cut to some of its rows; it may close over
            latents. Each of its sites has one entry for each row, along one axis, and rows must not depend on
            each other: a mean over the rows would be one of the block. What it returns is dropped.
        rows: rows of a block; by default as many, by powers of two, as 1 MiB of ``data`` holds (64 MiB on GPU and TPU).
            The last block may be smaller.

    Raises:
        ShapeError: the arrays of ``data`` have no common number of rows; a site does not have one entry for each row;
            ``likelihood`` does not run on a block.
        PPLError: ``rows`` is no positive integer.
        SpecError: the rows lie on an explicit axis of a mesh.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist, jax, jax.numpy as jnp
        >>> def model(x, y):
        ...     beta = ppl.sample("beta", dist.Normal(0.0, 1.0))
        ...
        ...     def likelihood(block):
        ...         x, y = block
        ...         ppl.observe("y", dist.Normal(beta * x, 1.0), y)
        ...
        ...     ppl.blocked(likelihood, rows=4)((x, y))
        >>> x = jnp.arange(10.0)
        >>> float(jax.grad(ppl.log_density(model))({"beta": 1.0}, x, 2 * x)["beta"])
        284.0
    """
    if rows is not None and not (isinstance(rows, int | np.integer) and not isinstance(rows, bool) and rows > 0):
        raise PPLError(
            "the number of rows of a block is no positive integer",
            source=_jax.current_line(),
            expected="rows=32_768, or rows=None for a size that fits the cache",
            found=f"{rows!r}",
            fix="ppl.blocked(likelihood, rows)(data): the rows of a block, not the number of blocks",
        )

    @functools.wraps(likelihood)
    def call(data: Any, *args: Any, **kwargs: Any) -> None:
        source = _jax.current_line()
        leaves, tree = jax.tree.flatten(data)
        operands = [as_array(leaf, "data of ppl.blocked") for leaf in leaves]
        length = _number_of_rows(operands, source)
        size = _default_rows(operands, length) if rows is None else int(rows)

        def run(*operands):
            likelihood(jax.tree.unflatten(tree, operands), *args, **kwargs)
            return []

        def run_block(*operands):
            try:
                return run(*operands)
            except (TypeError, ValueError) as error:
                raise _no_block(operands, error, source) from error

        if length <= size:
            run(*operands)
            return
        left = {length % size: run_block} if length % size else {}
        operands, params = assembled({length: run, size: run_block, **left}, operands, [0] * len(operands), source)
        if _jax.has_effect(params["whole"]) or _jax.has_effect(params["blocks"].block):
            blocked_p.bind(*operands, **params)

    return call


def _no_block(operands: Sequence[Any], error: Exception, source: str) -> ShapeError:
    return ShapeError(
        f"a likelihood given to ppl.blocked runs on all rows, but not on {operands[0].shape[0]} of them",
        source=source,
        expected="a likelihood that gets everything with an entry for each row as data",
        found=(str(error) or type(error).__name__).splitlines()[0],
        fix="ppl.blocked(likelihood)((x, y)), where the likelihood takes x and y from its block and not by closure",
    )


def _number_of_rows(operands: Sequence[Any], source: str) -> int:
    found = sorted({x.shape[:1] for x in operands})
    if len(found) != 1 or not found[0]:
        raise ShapeError(
            "the arrays given to ppl.blocked have no common number of rows",
            source=source,
            expected="one array or more, all of one length along the first axis",
            found=", ".join(str(x.shape) for x in operands) or "no array",
            fix="give what all rows share to the likelihood by closure, or after the data",
        )
    if any(_jax.spec_axes(jax.sharding.PartitionSpec(*jax.typeof(x).sharding.spec[:1])) for x in operands):
        raise SpecError(
            "the rows given to ppl.blocked lie on an explicit axis of a mesh, so that a block would be of one device",
            source=source,
            expected="rows of one device",
            found=", ".join(str(jax.typeof(x)) for x in operands),
            fix="call ppl.blocked inside of jax.shard_map over that axis, on the shard's own rows",
        )
    return found[0][0]


def _default_rows(operands: Sequence[Any], length: int) -> int:
    """The greatest power of two whose rows are not larger than a block should be."""
    total = sum(x.size * x.dtype.itemsize for x in operands)
    wanted = CACHED_BYTES if jax.default_backend() == "cpu" else LARGE_BYTES
    most = max(1, wanted * length // max(total, 1))
    return 1 << (most.bit_length() - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """A likelihood as traced for a block, and for the rows that are left.

    JAX and all that walks the bodies of an equation see the parameter ``whole`` alone, the likelihood of all rows, so
    that each site stands there once, in the shape that it has without blocks.

    Attributes:
        rows: rows of a block.
        axes: for each operand the axis of its rows, or None for what all blocks share.
        block: the equations for a block.
        rest: the equations for the rows that are left; None if there are none.
    """

    rows: int
    axes: tuple[int | None, ...]
    block: Jaxpr
    rest: Jaxpr | None

    @functools.cached_property
    def _structure(self) -> Any:
        rest = None if self.rest is None else structure_of(self.rest)
        return (self.rows, self.axes, structure_of(self.block), rest)

    @override
    def __hash__(self) -> int:
        return hash(self._structure)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocks) and self._structure == other._structure


def length_of(operands: Sequence[Any], axes: Sequence[int | None]) -> int:
    """The number of rows of all operands that have rows."""
    return next(np.shape(x)[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)


def assembled(
    runs: dict[int, Callable[..., Any]], operands: Sequence[Any], axes: Sequence[int | None], source: str
) -> tuple[list[Any], dict[str, Any]]:
    """Returns operands and parameters to bind ``blocked_p`` with.

    Args:
        runs: by the number of rows, the likelihood of all rows, of a block, and of the rows that are left.
        operands: its operands with all rows.
        axes: for each of them the axis of its rows, or None.
        source: the line of the call.
    """
    bodies, closed = zip(*(_body(run, size, operands, axes) for size, run in runs.items()), strict=True)
    shared = list({id(x): x for found in closed for x in found}.values())
    place = {id(x): i for i, x in enumerate(shared)}
    types = [jax.typeof(x) for x in shared]

    def with_all(body: Jaxpr, found: Sequence[Any], size: int) -> Jaxpr:
        if [id(x) for x in found] == list(place):
            return body
        own = [place[id(x)] for x in found]
        run = lambda *xs: tracing.call(body, *(xs[i] for i in own), *xs[len(shared) :])  # noqa: E731
        return tracing.closed(run, *types, *types_with_rows(operands, axes, size))

    whole, block, *rest = (with_all(b, f, s) for b, f, s in zip(bodies, closed, runs, strict=True))
    rows = list(runs)[1]
    blocks = Blocks(rows, (*[None] * len(shared), *axes), block, rest[0] if rest else None)
    return [*shared, *operands], {"whole": whole, "blocks": blocks, "source": source}


def types_with_rows(operands: Sequence[Any], axes: Sequence[int | None], size: int) -> list[Any]:
    """The types of operands, those with rows cut to ``size`` of them."""
    types = [jax.typeof(x) for x in operands]
    return [
        t if a is None else t.update(shape=(*t.shape[:a], size, *t.shape[a + 1 :]))
        for t, a in zip(types, axes, strict=True)
    ]


def _body(run: Callable[..., Any], size: int, operands: Sequence[Any], axes: Sequence[int | None]) -> Any:
    """The equations for ``size`` rows, and what they close over, which become their first inputs."""
    types = tuple(types_with_rows(operands, axes, size))
    traced, args = lift_constants(tracing.trace(run, *types), types)
    return _jax.without_constants(traced.jaxpr), [*traced.consts, *args[: len(args) - len(types)]]


def changed(change: Callable[[Jaxpr], Callable[..., Any]], whole: Jaxpr, blocks: Blocks, operands: Any) -> Any:
    """For ``assembled``: what ``change`` makes of each body, by its number of rows."""
    length = length_of(operands, blocks.axes)
    left = {} if blocks.rest is None else {length % blocks.rows: change(blocks.rest)}
    return {length: change(whole), blocks.rows: change(blocks.block), **left}


def _batch(lane: Lane, operands: Sequence[Any], *, whole: Jaxpr, blocks: Blocks, source: str) -> Any:
    """Each body is batched; the lanes share the blocks."""
    over = lambda body: _jax.over_lane(body, lane)  # noqa: E731
    axes = tuple(a + 1 if a is not None and m else a for a, m in zip(blocks.axes, lane.mapped, strict=True))
    rest = None if blocks.rest is None else over(blocks.rest)
    blocked_p.bind(
        *operands, whole=over(whole), blocks=Blocks(blocks.rows, axes, over(blocks.block), rest), source=source
    )
    return [], []


def _activate(flag: Any, operands: Sequence[Any], *, whole: Jaxpr, blocks: Blocks, source: str) -> Any:
    return assembled(changed(activated, whole, blocks, operands), [flag, *operands], (None, *blocks.axes), source)


blocked_p = effect_primitive("blocked", lambda *_, **__: [], _batch, _activate)

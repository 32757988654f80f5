"""The default handler of shard_map: the context enters the manual axes, is reduced there, and leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ppleffects.effects import _jax, mesh, tracing
from ppleffects.effects._jax import JaxprEqn
from ppleffects.effects.interpreter import HandlerResult, Interpreter, TracerValue, Uninitialized


def default_shard_map_handler[Context](
    interpreter: Interpreter[Context],
    ctx: Context,
    eqn: JaxprEqn,
    invals: list[TracerValue],
    *,
    declare_ctx_in_specs: Callable[[Context], Context | PartitionSpec] | None = None,
    declare_ctx_out_specs: Callable[[Context], Context | PartitionSpec] | None = None,
    reduce_ctx: Callable[[Context], Context] | None = None,
) -> HandlerResult[Context]:
    """Interprets the body of a shard_map once, inside of its manual axes, and binds what was traced there.

    Args:
        interpreter: runs the body.
        ctx: the context before the equation; each leaf is an array.
        eqn: the equation.
        invals: its operands.
        declare_ctx_in_specs: from the abstract context to the partition specs by which it enters (a prefix of its
            tree). None: ``P()`` for every leaf, the same on every shard.
        declare_ctx_out_specs: from the abstract context after the body to the specs by which it leaves. None: ``P()``
            for every leaf, which JAX refuses for a leaf that still varies.
        reduce_ctx: combines, inside of the manual axes, what the shards hold (``psum``, ``all_gather`` ...).

    Returns:
        The context after the equation, and the equation's results.
    """
    shard = _jax.shard_map_parts(eqn)
    abstract = jax.tree.map(lambda x: Uninitialized(jax.typeof(x)), ctx)
    ctx_specs = _specs(declare_ctx_in_specs, abstract)
    options: dict[str, Any] = {
        "mesh": None if isinstance(shard.mesh, jax.sharding.AbstractMesh) else shard.mesh,
        "axis_names": set(shard.axes),
        "check_vma": shard.check_vma,
    }

    def body(ctx, args):
        outs, ctx = interpreter(shard.body, ctx, *args)
        return outs, ctx if reduce_ctx is None else reduce_ctx(ctx)

    operands = (_placed(shard, ctx, ctx_specs), list(invals))
    in_specs = (ctx_specs, list(shard.in_specs))
    traced: list[tracing.Traced] = []

    def probe(ctx, args):
        traced.append(tracing.trace(body, ctx, args))

    jax.eval_shape(jax.shard_map(probe, in_specs=in_specs, out_specs=None, **options), *operands)
    _, after = traced[0].abstract_result
    out_specs = (list(shard.out_specs), _specs(declare_ctx_out_specs, after))
    outs, ctx = jax.shard_map(traced[0], in_specs=in_specs, out_specs=out_specs, **options)(*operands)
    return HandlerResult(ctx, outs)


def _specs(declare: Callable[[Any], Any] | None, abstract: Any) -> Any:
    """Returns the declared specs as a tree with one spec for each leaf of the context."""
    declared = PartitionSpec() if declare is None else declare(abstract)
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), declared, abstract, is_leaf=is_spec)


def _placed(shard: _jax.ShardMapParts, ctx: Any, specs: Any) -> Any:
    """On explicit axes JAX wants operands that lie as their spec says; elsewhere it moves them itself."""
    if not shard.explicit:
        return ctx

    def place(x, spec):
        full = PartitionSpec(*spec, *[None] * (jax.numpy.ndim(x) - len(spec)))
        return x if mesh.sharding_spec(x) == full else jax.sharding.reshard(x, NamedSharding(shard.mesh, full))

    return jax.tree.map(place, ctx, specs)

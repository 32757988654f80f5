"""Effects that are no probability: counting sines through JAX's control flow, and what becomes of the program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from _conformance_case import ONLY_EFFECTS, case
from _conformance_slub import Total, summing
from jax import lax
from jax.extend.core.primitives import sin_p
from slub.interpreter import HandlerResult as SlubResult
from slub.interpreter import reinterpret as slub_reinterpret

from ppleffects.effects import HandlerResult, Interpreter, default_dispatcher, reinterpret


class Counted:
    """A program's value, how many sines it computed, and how often a handler was called for one."""

    def __init__(self, library: str):
        self.library = library
        self.calls = 0

    def _ours(self, interpreter, ctx, eqn, invals):
        self.calls += 1
        return HandlerResult(ctx + 1, [eqn.primitive.bind(*invals, **eqn.params)])

    def _slub(self, interpreter, ctx, eqn, invals):
        self.calls += 1
        return SlubResult(Total(ctx.parent, ctx.value + 1), [eqn.primitive.bind(*invals, **eqn.params)])

    def __call__(self, fn, *args):
        """Returns the value of ``fn`` and the number of sines."""
        if self.library == "slub":
            handlers: dict[str, Any] = {"sin": self._slub}
            interpreter = summing(**handlers)
            out, ctx = slub_reinterpret(fn, interpreter)(Total(None, jnp.zeros((), int)), *args)
            return out, ctx.value
        interpreter = Interpreter(default_dispatcher().extended({sin_p: self._ours}))
        return reinterpret(fn, interpreter)(jnp.zeros((), int), *args)


def _both(name: str, demand: str, right: Any, program: Any, **settings: Any) -> None:
    """A case for ppleffects.effects and slub, whose program takes a ``Counted``."""
    added = case(name, demand, right, section="fails", cannot=ONLY_EFFECTS, **settings)
    for library in ("ppleffects", "slub"):
        added.on(library)(lambda library=library: program(Counted(library)))


def _scans(depth):
    def fn(x):
        if depth == 0:
            return jnp.sin(x)
        return lax.scan(lambda x, _: (_scans(depth - 1)(x), None), x, length=2)[0]

    return fn


def _nested(counted):
    counted(_scans(6), 1.0)
    return counted.calls


def _remat(counted):
    traced = jax.make_jaxpr(lambda x: counted(jax.checkpoint(lambda x: jnp.sin(x) ** 2), x))(1.0)
    return sum("prevent_cse" in eqn.params for eqn in traced.eqns)


def _custom_jvp():
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(*primals), 10.0 * tangents[0]))
    return f


def _custom_vjp():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), None), lambda _, cotangent: (10.0 * cotangent,))
    return f


def _own_rule(make):
    def program(counted):
        _, sines = counted(make(), 1.0)
        return sines, jax.grad(lambda x: counted(make(), x)[0])(1.0)

    return program


def _switch(counted):
    branches = [lambda x: x, jnp.sin, lambda x: jnp.sin(jnp.sin(x))]
    return [counted(lambda x, i=i: lax.switch(i, branches, x), 1.0)[1] for i in range(3)]


def _empty(counted):
    def fn(xs):
        return lax.scan(lambda c, x: (c + jnp.sin(x), None), 0.0, xs)[0]

    return counted(fn, jnp.zeros(0))[1]


_both(
    "scans nested 6 deep", "how often the handler of one sine is called: once for each equation", 1, _nested, cost=True
)
_both(
    "checkpoint stays", "the number of checkpoints in the interpreted program of one that has one", 1, _remat, cost=True
)
_both(
    "custom_jvp", "sines in a custom_jvp function, and its derivative by its own rule", (1, 10), _own_rule(_custom_jvp)
)
_both(
    "custom_vjp", "sines in a custom_vjp function, and its derivative by its own rule", (1, 10), _own_rule(_custom_vjp)
)
_both("3-way switch", "sines in the branches 0, 1 and 2 of a switch that have as many", (0, 1, 2), _switch)
_both("a scan of no steps", "sines in a scan of length 0", 0, _empty)

"""``scope``: a model inside of a model, under its own names."""

from __future__ import annotations

from ppleffects.errors import PPLError
from ppleffects.transforms.rewrite import Model, rebind, rewrite


def scope(model: Model, prefix: str) -> Model:
    """A model whose sites ``x`` are named ``prefix/x``.

    Args:
        model: a function with sites in it.
        prefix: what stands before the slash.

    Raises:
        PPLError: ``prefix`` is no string, or empty.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist
        >>> def effect():
        ...     return ppl.sample("x", dist.Normal(0.0, 1.0))
        >>> def model():
        ...     return ppl.scope(effect, "a")() + ppl.scope(effect, "b")()
        >>> list(ppl.sites(model)())
        ['a/x', 'b/x']
    """
    if not isinstance(prefix, str) or not prefix:
        raise PPLError(
            "a scope needs a name",
            expected="a string that is not empty",
            found=repr(prefix),
            fix='the model comes first, as in ppl.scope(submodel, "a")',
        )

    def rule(ctx, eqn, operands):
        site = eqn.params["site"].replace(name=f"{prefix}/{eqn.params['name']}")
        rest = {k: v for k, v in eqn.params.items() if k not in ("site", "name", "source")}
        return rebind(eqn.primitive, site, operands, **rest)

    return rewrite(model, rule)

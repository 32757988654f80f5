"""``condition`` and ``do``: latents that are given a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ppleffects.interpretations.run import checked_values
from ppleffects.language import deterministic_p, observe_p, sample_p
from ppleffects.language.arguments import as_mapping
from ppleffects.transforms.rewrite import Model, rebind, rewrite, typed_like


def condition(model: Model, values: Mapping[str, Any]) -> Model:
    """A model in which some latents are observed.

    Their log density stays in the joint density: ``log p(x, y)`` at the given ``x``.

    Args:
        model: a function with sites in it.
        values: values of latents by name, each in the layout of its site (scans, vmaps, batch and event axes).

    Raises:
        ValuesError: a name is none of the model's latents.
        ShapeError: a value does not have the shape of its site.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist
        >>> def model():
        ...     x = ppl.sample("x", dist.Normal(0.0, 1.0))
        ...     return ppl.sample("y", dist.Normal(x, 1.0))
        >>> list(ppl.simulate(ppl.condition(model, {"y": 3.0}))(0).latents)
        ['x']
    """
    values = as_mapping(values, "values")

    def rule(ctx, eqn, operands):
        site = eqn.params["site"]
        if eqn.primitive is not sample_p or site.name not in ctx.inputs.values:
            return None
        at = site.structure.num_arrays
        value = typed_like(eqn, ctx.inputs.values[site.name])
        operands = [*operands[:at], value, *operands[at:]]
        return rebind(observe_p, site.with_operand(at, lanes=True).replace(predicted=False), operands)

    return rewrite(model, rule, inputs=lambda program: checked_values(program, values, partial=True))


def do(model: Model, values: Mapping[str, Any]) -> Model:
    """A model on which one has intervened: sites have given values, and no density.

    What follows from the values follows; nothing is learned from them. The sites become deterministic.

    Args:
        model: a function with sites in it.
        values: values of latents or observations by name, each in the layout of its site.

    Raises:
        ValuesError: a name is none of the model's sites.
        ShapeError: a value does not have the shape of its site.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist
        >>> def model():
        ...     x = ppl.sample("x", dist.Normal(0.0, 1.0))
        ...     return ppl.sample("y", dist.Normal(x, 1.0))
        >>> round(float(ppl.log_density(ppl.do(model, {"x": 2.0}))({"y": 2.0})), 4)
        -0.9189
    """
    values = as_mapping(values, "values")

    def rule(ctx, eqn, operands):
        site = eqn.params["site"]
        if eqn.primitive not in (sample_p, observe_p) or site.name not in ctx.inputs.values:
            return None
        value = typed_like(eqn, ctx.inputs.values[site.name])
        kept = [value, *operands[len(operands) - site.conditional :]]
        lanes = tuple(
            dataclasses.replace(lane, mapped=(True, *lane.mapped[len(operands) - site.conditional :]))
            for lane in site.lanes
        )
        plain = site.replace(lanes=lanes, structure=None, masked=False, scaled=False, predicted=False)
        return rebind(deterministic_p, plain, kept)

    kinds = ("sample", "observe")
    return rewrite(model, rule, inputs=lambda program: checked_values(program, values, partial=True, kinds=kinds))

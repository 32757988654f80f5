"""Checks a traced model before it is interpreted: each site is there once, and its place on the mesh is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppleffects.effects import _jax
from ppleffects.effects.handlers import own_rule_error
from ppleffects.errors import DuplicateSiteError, SpecError, UnsupportedPrimitiveError
from ppleffects.interpretations.layout import Occurrence, Step
from ppleffects.interpretations.rows import row_axes
from ppleffects.language import SiteParams


def check_sites(found: Sequence[Occurrence]) -> None:
    """Raises the error that describes the first site that is not well defined.

    Raises:
        DuplicateSiteError: a name stands twice, other than in two branches of one cond.
        SpecError: types do not say how a site lies on the mesh, and neither does ``spec=``.
        ShapeError: a site in a blocked likelihood does not have one entry for each row.
        UnsupportedPrimitiveError: a latent or deterministic in a while loop, whose number of values is unknown.
    """
    first: dict[str, list[Occurrence]] = {}
    for occurrence in found:
        _check_rules(occurrence)
        for other in first.setdefault(occurrence.site.name, []):
            if not _in_other_branch(other, occurrence):
                raise _duplicate(other, occurrence)
        first[occurrence.site.name].append(occurrence)
        _check_loops(occurrence)
        _check_mesh(occurrence)
    blocked = {id(step.eqn): step.eqn for occurrence in found for step in occurrence.path if step.kind == "blocked"}
    for eqn in blocked.values():
        row_axes(eqn)


def _check_rules(occurrence: Occurrence) -> None:
    for step in occurrence.path:
        if _jax.has_own_rule(step.eqn):
            raise own_rule_error(step.eqn, occurrence.eqn)
        if step.kind != "blocked" and step.eqn.primitive not in _jax.CONTROL_FLOW.values():
            raise UnsupportedPrimitiveError(
                f"'{step.kind}' at {step.line} holds a site, and there is no rule for it",
                site=occurrence.site.name,
                source=occurrence.site.source,
                expected=f"one of {', '.join(sorted(_jax.CONTROL_FLOW))}",
                found=f"{step.kind}",
                fix=f"take the site out of '{step.kind}' and pass its value in",
            )


def _in_other_branch(a: Occurrence, b: Occurrence) -> bool:
    for x, y in zip(a.path, b.path, strict=False):
        if x.eqn is not y.eqn:
            return False
        if x.branch != y.branch:
            return x.kind in ("cond", "lane_cond")
    return False


def _duplicate(a: Occurrence, b: Occurrence) -> DuplicateSiteError:
    lines = a.site.source, b.site.source
    note = ""
    if lines[0] == lines[1]:
        outer = [_first_difference(a.path, b.path), _first_difference(b.path, a.path)]
        if all(outer) and outer[0] != outer[1]:
            note, lines = f" (the site itself is at {a.site.source}, reached by two calls)", (outer[0], outer[1])
        else:
            note = " (one line, traced twice: by a Python loop, lax.map's remainder or lax.associative_scan)"
    return DuplicateSiteError(
        f"two sites have this name: {lines[0]} and {lines[1]}{note}",
        site=a.site.name,
        source=lines[1],
        expected="each name once in a model (the branches of one cond may share a name)",
        found=f"'{a.kind}' and '{b.kind}'",
        fix='give each its own name, as in ppl.scope(submodel, "a") and ppl.scope(submodel, "b"), '
        'or sample(f"x{i}", ...) in a Python loop; use jax.vmap or lax.scan for many sites of one name',
    )


def _first_difference(path: Sequence[Step], other: Sequence[Step]) -> str | None:
    for i, step in enumerate(path):
        if i >= len(other) or step.eqn is not other[i].eqn:
            return step.line
    return None


def _check_loops(occurrence: Occurrence) -> None:
    loop = next((step for step in occurrence.path if step.kind == "while"), None)
    if loop is not None and occurrence.kind in ("sample", "deterministic"):
        raise UnsupportedPrimitiveError(
            f"a {occurrence.kind} site inside of a while loop has an unknown number of values",
            site=occurrence.site.name,
            source=occurrence.site.source,
            expected="only 'observe' and 'factor' inside of a while loop",
            found=f"'{occurrence.kind}'",
            fix="use lax.scan, or lax.fori_loop with a static number of steps, whose length is known",
        )


def _check_mesh(occurrence: Occurrence) -> None:
    site, kind = occurrence.site, occurrence.kind
    shards = [occurrence.path[i] for i in occurrence.shards]
    if not shards:
        return
    own = frozenset().union(*(step.axes for step in shards))
    where = f"the shard_map over {sorted(own)} at {shards[-1].line}"
    if site.spec is None and not all(step.eqn.params["check_vma"] for step in shards):
        raise SpecError(
            "inside of a shard_map with check_vma=False it is unknown whether the site varies from shard to shard",
            site=site.name,
            source=site.source,
            expected="check_vma=True (the default), or spec= on the site",
            found=f"{where} has check_vma=False and the site no spec=",
            fix='spec=P("axis") if each shard has its own piece, spec=P() if the site is the same on all',
        )
    _check_predicate(occurrence, own)
    varies = occurrence.operand_axes & own
    if kind == "sample":
        _check_latent(occurrence, own, varies, where)
    elif _is_ambiguous(occurrence, varies, len(shards)):
        raise SpecError(
            f"an unvarying {kind} under a vmap inside of shard_map: one term for all shards, or one for each?",
            site=site.name,
            source=site.source,
            expected="a value or parameters that vary over the mesh axis, or spec=",
            found=f"nothing at this site varies over {sorted(own)} in {where}",
            fix='spec=P() to count it once, spec=P("axis") to count it on every shard',
        )


def _parameter(site: SiteParams, index: int) -> str:
    names = () if site.structure is None else site.structure.names
    return f"'{names[index]}'" if index < len(names) else "the mask"


def _check_predicate(occurrence: Occurrence, own: frozenset[str]) -> None:
    """A site that some shards reach and others do not cannot be the same on all."""
    site = occurrence.site
    reached = occurrence.predicate_axes & own
    shared = reached - occurrence.axes
    if shared or (occurrence.kind == "sample" and site.spec is None and reached - occurrence.operand_axes):
        axis = sorted(shared or reached)[0]
        raise SpecError(
            f"the site stands in a branch or loop that some shards of '{axis}' take and others do not",
            site=site.name,
            source=site.source,
            expected=f"a site that varies over '{axis}', or a predicate that does not",
            found=f"spec={site.spec}",
            fix=f'spec=P("{axis}"), or a predicate that is equal on all shards (jax.lax.psum, jax.lax.pmax)',
        )


def _is_ambiguous(occurrence: Occurrence, varies: frozenset[str], depth: int) -> bool:
    site = occurrence.site
    inside = any(lane.depth < depth for lane in site.lanes)
    return occurrence.kind in ("observe", "factor") and site.spec is None and not varies and inside


def _check_latent(occurrence: Occurrence, own: frozenset[str], varies: frozenset[str], where: str) -> None:
    site = occurrence.site
    example = sorted(own)[0]
    if site.spec is None and not varies:
        raise SpecError(
            "a latent inside of shard_map whose parameters do not vary: one value for all shards, or one for each?",
            site=site.name,
            source=site.source,
            expected="spec= on the site",
            found=f"parameters that are equal on all shards of {where}",
            fix=f'spec=P() for one shared value, spec=P("{example}") for a piece of its own on each shard',
        )
    if site.spec is not None and (extra := varies - occurrence.axes):
        index = next(i for i, v in enumerate(occurrence.eqn.invars) if extra & _axes_of(v))
        raise SpecError(
            f"spec={site.spec} says that the latent is equal along {sorted(extra)}, but its parameters vary there",
            site=site.name,
            source=site.source,
            expected=f"parameters that do not vary over {sorted(extra)}",
            found=f"{_parameter(site, index)} of {type(occurrence.abstract_distribution()).__name__} varies over "
            f"{sorted(_axes_of(occurrence.eqn.invars[index]))}",
            fix="make the parameter equal on all shards (jax.lax.psum, or jax.lax.all_gather(..., to='invarying')), "
            f'or say spec=P("{sorted(extra)[0]}")',
        )


def _axes_of(var: Any) -> frozenset[str]:
    return _jax.varying(var.aval)

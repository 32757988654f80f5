"""What a program means, in plain Python: loops, lanes, branches and shards are unrolled, one number after the other.

Nothing here uses ppleffects. All shards of a ``shard_map`` run side by side, one statement at a time, so that a
collective is a mean of a list.
"""

import collections
import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.property import programs as ast
from tests.property.distributions import FAMILIES, log_det, mix, spread

type Axes = frozenset[str]
NOWHERE: Axes = frozenset()


@dataclasses.dataclass(frozen=True)
class Frame:
    """One statement around a site; ``index``: which of its ``size`` steps or lanes. Of a shard_map: its axes."""

    kind: str
    size: int = 1
    index: int = 0
    axes: tuple[str, ...] = ()
    node: Any = None
    content: Any = None


@dataclasses.dataclass
class Instance:
    """The variables on one shard, whose number along each mesh axis is in ``at``."""

    at: dict[str, int]
    c: Any
    x: Any
    k: Any


@dataclasses.dataclass
class Place:
    """A site where it stands: its full name, the shape around it, and its position therein."""

    name: str
    shape: tuple[int, ...]
    index: tuple[Any, ...]
    weight: Any = 1.0
    keep: Any = True
    given: Any = None
    kind: str = "sample"


@dataclasses.dataclass(frozen=True)
class Info:
    """What is known of a site without running the program."""

    kind: str
    shape: tuple[int, ...]
    event_dim: int
    discrete: bool
    everywhere: bool


class Plain:
    """One run of a program.

    Args:
        program: what to run.
        data: its floats by name.
        ints: its integers by name.
        values: the values of its latents by name; None: nothing is computed, all branches are visited once, and
            ``infos`` says which sites there are.
    """

    def __init__(self, program, data, ints, values=None):
        self.data, self.ints, self.latents = data, ints, values
        self.static = values is None
        self.sizes = dict(program.mesh)
        self.total, self.log_det = jnp.zeros(()), jnp.zeros(())
        self.values, self.log_probs = collections.defaultdict(list), collections.defaultdict(list)
        self.unconstrained = collections.defaultdict(list)
        self.infos: dict[str, Info] = {}
        start = [Instance({}, data["c"], data["x"], ints["k"])] if not self.static else []
        types = {"c": NOWHERE, "x": NOWHERE, "k": NOWHERE}
        self.run(program.body, types, start, (), NOWHERE)
        self.result = start[0].c if start else None

    def numbers(self):
        """All that was computed, without the positions."""
        found = [self.total, self.log_det, self.result]
        return found, [{n: [x for _, x in ps] for n, ps in d.items()} for d in self._found()]

    def with_numbers(self, numbers):
        """The run with ``numbers`` in place of its own, which a derivative has traced."""
        (self.total, self.log_det, self.result), found = numbers
        for d, new in zip(self._found(), found, strict=True):
            for n, pieces in d.items():
                d[n] = [(index, x) for (index, _), x in zip(pieces, new[n], strict=True)]
        return self

    def _found(self):
        return self.values, self.log_probs, self.unconstrained

    def run(self, body, types, group, frames, reached):
        """Runs statements; changes ``c`` of each instance, and ``types``, the axes that JAX has for each variable."""
        for s in body:
            if isinstance(s, ast.Site):
                self.site(s, types, group, frames, reached)
            else:
                getattr(self, type(s).__name__.lower())(s, types, group, frames, reached)

    def inner(self, body, types, group, frames, reached):
        """Runs a function whose variables are its own."""
        types = dict(types)
        inside = [dataclasses.replace(i) for i in group]
        self.run(body, types, inside, frames, reached)
        return types["c"], [i.c for i in inside]

    def through(self, s, types, group, reached, frames):
        types["c"], results = self.inner(s.body, types, group, frames, reached)
        for instance, c in zip(group, results, strict=True):
            instance.c = c

    def jit(self, s, types, group, frames, reached):
        self.through(s, types, group, reached, frames)

    checkpoint = jit

    def twice(self, s, types, group, frames, reached):
        for prefix in "ab":
            self.through(s, types, group, reached, (*frames, Frame("scope", content=prefix + s.id)))

    def scope(self, s, types, group, frames, reached):
        self.through(s, types, group, reached, (*frames, Frame("scope", content=s.id)))

    def wrapped(self, s, types, group, frames, reached, make):
        """Runs a function under a transformation whose operand each instance makes."""
        content = {tuple(i.at.items()): make(i) for i in group}
        self.through(s, types, group, reached, (*frames, Frame(type(s).__name__.lower(), node=s, content=content)))

    def scale(self, s, types, group, frames, reached):
        own = self.data.get(s.id)
        self.wrapped(
            s, types, group, frames, reached, lambda i: 1.2 + 0.1 * i.x + own if s.arg == "x" else 1.5 + 0.1 * own
        )

    def mask(self, s, types, group, frames, reached):
        self.wrapped(s, types, group, frames, reached, lambda i: (i.k if s.arg == "k" else self.ints[s.id]) % 2 == 0)

    def given(self, s, types, group, frames, reached):
        values = {}
        for name, family, _ in () if self.static else s.values:
            f = FAMILIES[family]
            key = f"{s.id}:{name}"
            values[name] = f.inside(self.ints[key] if f.discrete else self.data[key])
        self.wrapped(s, types, group, frames, reached, lambda _: values)

    def vmap(self, s, types, group, frames, reached):
        results = [[] for _ in group]
        inner_type = types["c"]
        for lane in range(1 if self.static else s.size):
            inside = [dataclasses.replace(i) for i in group]
            for i in inside:
                for v in s.maps:
                    offset = self.ints[s.id][lane] if v == "k" else self.data[f"{s.id}{v}"][lane]
                    setattr(i, v, getattr(i, v) + offset)
                if "x" in s.maps and s.axis:
                    i.x = 3.0 * i.x
            frame = Frame("vmap", s.size, lane)
            inner_type, cs = self.inner(s.body, types, inside, (*frames, frame), reached)
            for found, c in zip(results, cs, strict=True):
                found.append(c)
        if s.rows is None:
            types["c"] = inner_type
            for instance, found in zip(group, results, strict=True):
                instance.c = sum(found) / s.size

    def scan(self, s, types, group, frames, reached):
        types["c"] = types["c"] | set(s.carry)
        steps = range(1) if self.static else range(s.length)
        for step in reversed(steps) if s.reverse else steps:
            inside = [dataclasses.replace(i) for i in group]
            for i in inside:
                i.x = i.x + self.data[s.id][step] if "x" in s.over else i.x
                i.k = i.k + self.ints[s.id][step] if "k" in s.over else i.k
            _, cs = self.inner(s.body, types, inside, (*frames, Frame("scan", s.length, step)), reached)
            for instance, c in zip(group, cs, strict=True):
                instance.c = c

    def cond(self, s, types, group, frames, reached):
        reached = reached | (types["k"] if s.pred == "k" else NOWHERE)
        taken = [int(i.k if s.pred == "k" else self.ints["flag"]) % len(s.branches) for i in group]
        for number, body in enumerate(s.branches):
            chosen = [i for i, t in zip(group, taken, strict=True) if t == number]
            if chosen or self.static:
                frame = Frame("cond", node=s, index=number)
                _, cs = self.inner(body, types, chosen, (*frames, frame), reached)
                for instance, c in zip(chosen, cs, strict=True):
                    instance.c = c
        types["c"] = frozenset(s.carry)

    def shard(self, s, types, group, frames, reached):
        inside, owners = [], []
        for owner in group:
            for place in itertools.product(*(range(self.sizes[a]) for a in s.axes)):
                at = {**owner.at, **dict(zip(s.axes, place, strict=True))}
                i = dataclasses.replace(owner, at=at)
                number = self.number(s.axes, at)
                for v in s.split:
                    offset = self.ints[s.id][number] if v == "k" else self.data[f"{s.id}{v}"][number]
                    setattr(i, v, getattr(i, v) + offset)
                inside.append(i)
                owners.append(owner)
        own = {v: types[v] | (set(s.axes) if v in s.split else NOWHERE) for v in types}
        c_type, cs = self.inner(s.body, own, inside, (*frames, Frame("shard", axes=s.axes)), reached)
        types["c"] = c_type - set(s.axes)
        for owner in group:
            pieces = [c for c, o in zip(cs, owners, strict=True) if o is owner]
            owner.c = sum(pieces) / len(pieces)

    def collective(self, s, types, group, frames, reached):
        others = collections.defaultdict(list)
        for i in group:
            others[tuple(n for a, n in i.at.items() if a not in s.axes)].append(i)
        for members in others.values():
            mean = sum(i.c for i in members) / len(members)
            for i in members:
                i.c = mean
        types["c"] = types["c"] - set(s.axes) if s.kind == "pmean" else types["c"] | set(s.axes)

    def number(self, axes, at):
        """The number of a shard among those along ``axes``."""
        result = 0
        for a in axes:
            result = result * self.sizes[a] + at[a]
        return result

    def site(self, s, types, group, frames, reached):
        varies = reached | (types[s.arg] if s.arg != "data" else NOWHERE)
        if s.mask == "k":
            varies = varies | types["k"]
        if isinstance(s, ast.Observe) and s.value != "data":
            varies = varies | types[s.value]
        own = frozenset(a for f in frames if f.kind == "shard" for a in f.axes)
        axes = varies if s.spec is None else frozenset(s.spec)
        if self.static:
            self.note(s, axes, frames)
        for i in group:
            self.visit(s, axes, frames, i, counted=all(i.at[a] == 0 for a in own - axes))
        if isinstance(s, ast.Sample) and s.mix:
            types["c"] = types["c"] | axes

    def note(self, s, axes, frames):
        place = self.place(s, axes, frames, None)
        event, discrete = (), False
        if isinstance(s, ast.Sample | ast.Observe):
            event, discrete = FAMILIES[s.dist].event, FAMILIES[s.dist].discrete
        branches = [f.node for f in frames if f.kind == "cond"]
        everywhere = all(all(_holds(b, s.name) for b in node.branches) for node in branches)
        self.infos[place.name] = Info(place.kind, (*place.shape, *event), len(event), discrete, everywhere)

    def place(self, s, axes, frames, at) -> Place:
        """Where a site stands: from the inside to the outside, each statement adds what it does to it."""
        kind = type(s).__name__.lower()
        dims: list[tuple[int, Any]] = [(n, slice(0, n)) for n in s.batch]
        scans: list[tuple[int, int]] = []
        place = Place(s.name, (), (), kind=kind)
        spec_at = s.at
        for f in reversed(frames):
            if f.kind == "vmap":
                dims.insert(0, (f.size, f.index))
            elif f.kind == "scan":
                scans.insert(0, (f.size, f.index))
            elif f.kind == "shard":
                here = tuple(a for a in f.axes if a in axes)
                count = math.prod(self.sizes[a] for a in here)
                number = 0 if at is None else self.number(here, at)
                if here and dims:
                    size, where = dims[spec_at]
                    dims[spec_at] = (size * count, _moved(where, number * size))
                elif here:
                    dims.insert(0, (count, number))
                spec_at = 0
            elif f.kind == "scope":
                place.name = f"{f.content}/{place.name}"
            elif f.kind in ("scale", "mask", "given"):
                self.transform(place, f, [*scans, *dims], at)
        place.shape = tuple(n for n, _ in [*scans, *dims])
        place.index = tuple(i for _, i in [*scans, *dims])
        return place

    def transform(self, place, f, dims, at):
        content = None if at is None else f.content[tuple((a, at[a]) for a in _axes_of(f.content))]
        named = getattr(f.node, "sites", None) is None or place.name in f.node.sites
        if f.kind == "given" and place.name in {name for name, *_ in f.node.values}:
            if f.node.kind == "condition" and place.kind != "sample":
                return
            place.kind = "observe" if f.node.kind == "condition" else "deterministic"
            if at is not None:
                place.given = content[place.name][tuple(i for _, i in dims)]
        elif f.kind == "scale" and named and at is not None:
            place.weight = place.weight * content
        elif f.kind == "mask" and named and at is not None:
            place.keep = place.keep & content

    def visit(self, s, axes, frames, i: Instance, *, counted):
        place = self.place(s, axes, frames, i.at)
        m = {"c": 0.5 * i.c, "x": 0.3 * i.x, "data": self.data.get(s.name)}[s.arg]
        if isinstance(s, ast.Factor):
            terms = jnp.where(place.keep, -0.5 * (spread(m, s.batch) - 0.3) ** 2, 0.0)
            self.total = self.total + (jnp.sum(terms) * place.weight if counted else 0.0)
        elif isinstance(s, ast.Deterministic):
            self.values[place.name].append((place.index, jnp.sin(spread(m, s.batch))))
        else:
            self.random(s, i, place, spread(m, () if isinstance(s, ast.Observe) and s.wide else s.batch), counted)

    def random(self, s, i, place, m, counted):
        family = FAMILIES[s.dist]
        d = family.make(m)
        keep = jnp.asarray(place.keep)
        if s.mask is not None:
            keep = keep & ((i.k if s.mask == "k" else self.ints[f"{s.name}m"]) % 2 == 0)
        keep = jnp.broadcast_to(keep, s.batch)
        if place.given is not None:
            value = place.given
        elif isinstance(s, ast.Sample):
            value = self.latents[place.name][place.index]
        else:
            value = self.observed(s, i, family)
        seen = value
        if isinstance(s, ast.Observe) and s.poisoned and place.given is None:
            own = jnp.broadcast_to((i.k if s.mask == "k" else self.ints[f"{s.name}m"]) % 2 == 0, s.batch)
            seen = jnp.where(own.reshape(*s.batch, *[1] * len(family.event)), value, jnp.nan)
        self.values[place.name].append((place.index, seen))
        if place.kind != "deterministic":
            log_prob = jnp.where(keep, d.log_prob(value), 0.0) * place.weight
            self.log_probs[place.name].append((place.index, log_prob))
            self.total = self.total + (jnp.sum(log_prob) if counted else 0.0)
        if place.kind == "sample" and not family.discrete:
            u, det = log_det(d, value)
            self.unconstrained[place.name].append((place.index, u))
            self.log_det = self.log_det + (det if counted else 0.0)
        if isinstance(s, ast.Sample) and s.mix:
            i.c = mix(i.c, value)

    def observed(self, s, i, family):
        raw = (self.ints if family.discrete else self.data)[f"{s.name}y"]
        if s.value != "data":
            raw = raw + (i.k if s.value == "k" else 0.5 * getattr(i, s.value))
        return family.inside(raw)


def _moved(where, by):
    return where + by if isinstance(where, int) else slice(where.start + by, where.stop + by)


def _axes_of(content):
    """The axes that shards had where a transformation stands; those made later do not matter to it."""
    return [a for a, _ in next(iter(content))]


def _holds(body, name):
    for s in body:
        if isinstance(s, ast.Site) and s.name == name:
            return True
        if isinstance(s, ast.Block) and _holds(s.body, name):
            return True
        if isinstance(s, ast.Cond) and all(_holds(b, name) for b in s.branches):
            return True
    return False


def joined(pieces, shape, missing):
    """Puts pieces by position into one array; what no piece covers is ``missing``. Also says what is covered."""
    whole = np.full(shape, missing)
    covered = np.zeros(shape, bool)
    for index, piece in pieces:
        whole[index] = piece
        covered[index] = True
    return whole, covered

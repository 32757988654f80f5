"""Random programs as data: statements that print as the Python function which they stand for.

Every function of a program has three variables: ``c``, a number that sites change as the program goes on; ``x``, a
number made of data; ``k``, an integer made of data. Loops, lanes and shards each add their own data to them.
"""

import dataclasses
import linecache
import math
import textwrap
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from tests.property.distributions import FAMILIES, mix, spread

type Axes = tuple[str, ...]
type Body = tuple[Any, ...]
VARIABLES = ("c", "x", "k")


@dataclasses.dataclass(frozen=True)
class Site:
    """What sites share.

    Attributes:
        name: the site's name.
        arg: what its parameters are made of: ``c``, ``x``, or ``data``, which is the same everywhere.
        batch: the batch shape.
        spec: the mesh axes named by ``spec=``; None leaves it out.
        at: which non-event axis of the piece ``spec=`` shards.
        mask: None; ``k``, a boolean that depends on ``k``; ``fixed``, one for each entry of the batch.
    """

    name: str
    arg: str = "c"
    batch: tuple[int, ...] = ()
    spec: Axes | None = None
    at: int = 0
    mask: str | None = None


@dataclasses.dataclass(frozen=True)
class Sample(Site):
    """A latent. ``mix``: whether ``c`` goes on with its value."""

    dist: str = "normal"
    mix: bool = True


@dataclasses.dataclass(frozen=True)
class Observe(Site):
    """An observation.

    Attributes:
        value: what it is made of: ``c``, ``x`` (``k`` for integers), or ``data``.
        wide: whether the distribution is a scalar, to be broadcast to a batch of values.
        poisoned: whether masked entries are NaN.
    """

    dist: str = "normal"
    value: str = "data"
    wide: bool = False
    poisoned: bool = False


@dataclasses.dataclass(frozen=True)
class Factor(Site):
    """A factor."""


@dataclasses.dataclass(frozen=True)
class Deterministic(Site):
    """A recorded value."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """``c`` is combined over the shards: ``pmean`` (of type unvarying), or ``gather`` (varying, and yet equal)."""

    kind: str
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Block:
    """What statements with a body share. ``id``: its name in the program."""

    id: str
    body: Body


@dataclasses.dataclass(frozen=True)
class Jit(Block):
    """A compiled function."""


@dataclasses.dataclass(frozen=True)
class Checkpoint(Block):
    """``jax.checkpoint``."""


@dataclasses.dataclass(frozen=True)
class Twice(Block):
    """A jitted function called under two scopes."""


@dataclasses.dataclass(frozen=True)
class Scope(Block):
    """``ppl.scope``."""


@dataclasses.dataclass(frozen=True)
class Scale(Block):
    """``ppl.scale`` by a number made of ``arg``; ``sites`` names those concerned."""

    arg: str = "data"
    sites: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Mask(Block):
    """``ppl.mask`` by a boolean made of ``arg``."""

    arg: str = "data"
    sites: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Given(Block):
    """``ppl.condition`` or ``ppl.do``; ``values``: name, family, shape of each."""

    kind: str = "condition"
    values: tuple[tuple[str, str, tuple[int, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Vmap(Block):
    """A vmap; ``maps``: the variables that are batched, ``x`` along ``axis``.

    If there are ``rows``, its lanes are rows of ``ppl.blocked``, so many in a block, and ``c`` stays as it was.
    """

    size: int = 2
    maps: tuple[str, ...] = ("x", "k")
    axis: int = 0
    rows: int | None = None


@dataclasses.dataclass(frozen=True)
class Scan(Block):
    """A scan with carry ``c``, cast to vary over ``carry``; ``over``: the variables that change from step to step."""

    length: int = 2
    over: tuple[str, ...] = ("x", "k")
    reverse: bool = False
    carry: Axes = ()


@dataclasses.dataclass(frozen=True)
class Cond:
    """A cond or switch; the predicate is made of ``k`` or of the number ``flag``; results are cast to ``carry``."""

    id: str
    branches: tuple[Body, ...]
    pred: str = "k"
    carry: Axes = ()


@dataclasses.dataclass(frozen=True)
class Shard(Block):
    """A shard_map over ``axes``; ``split``: the variables of which each shard has its own piece."""

    axes: Axes = ("data",)
    split: tuple[str, ...] = ("x", "k")


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: its first function, and the mesh it runs on.

    Attributes:
        body: the statements.
        mesh: sizes by axis.
        explicit: whether the mesh has Explicit axes.
        ambient: whether it comes from ``jax.set_mesh``.
    """

    body: Body
    mesh: tuple[tuple[str, int], ...] = (("data", 2),)
    explicit: bool = False
    ambient: bool = False

    def __str__(self) -> str:
        return f"{self!r}\n\n{Printer(self).source}\non mesh {self.mesh}, {self.explicit=}, {self.ambient=}"


class Printer:
    """Writes a program as Python source, and notes the shapes of the data that it reads."""

    def __init__(self, program: Program):
        self.sizes = dict(program.mesh)
        self.whole = set(self.sizes)
        self.ambient = program.ambient
        self.floats: dict[str, tuple[int, ...]] = {"c": (), "x": ()}
        self.ints: dict[str, tuple[int, ...]] = {"k": (), "flag": ()}
        body = self.block(program.body, nested=False)
        self.source = (
            "def model(data, ints):\n    c, x, k = data['c'], data['x'], ints['k']\n"
            + textwrap.indent(body, "    ")
            + "    return c\n"
        )

    def float(self, name: str, shape: tuple[int, ...] = ()) -> str:
        self.floats[name] = shape
        return f"data[{name!r}]"

    def int(self, name: str, shape: tuple[int, ...] = ()) -> str:
        self.ints[name] = shape
        return f"ints[{name!r}]"

    def block(self, body: Body, nested: bool) -> str:
        return "".join(self.statement(s, nested) for s in body)

    def function(self, name: str, body: Body, nested: bool, *, first: str = "", result: str = "c", more="") -> str:
        inner = f"{first}{self.block(body, nested)}return {result}\n"
        return f"def {name}(c, x, k{more}):\n{textwrap.indent(inner, '    ')}"

    def statement(self, s: Any, nested: bool) -> str:
        if isinstance(s, Site):
            return self.site(s)
        if isinstance(s, Collective):
            reduced = f"lax.pmean(c, {s.axes!r})" if s.kind == "pmean" else f"lax.all_gather(c, {s.axes!r}).mean()"
            return f"c = {reduced}\n"
        if isinstance(s, Cond):
            return self.cond(s, nested)
        if isinstance(s, Shard):
            return self.shard(s, nested)
        result = f"vary(c, {s.carry!r})" if isinstance(s, Scan) and s.carry else "c"
        text = self.function(s.id, s.body, nested, result=result)
        return text + getattr(self, type(s).__name__.lower())(s)

    def jit(self, s):
        return f"c = jax.jit({s.id})(c, x, k)\n"

    def checkpoint(self, s):
        return f"c = jax.checkpoint({s.id})(c, x, k)\n"

    def twice(self, s):
        return (
            f"{s.id} = jax.jit({s.id})\nc = ppl.scope({s.id}, 'a{s.id}')(c, x, k)\n"
            f"c = ppl.scope({s.id}, 'b{s.id}')(c, x, k)\n"
        )

    def scope(self, s):
        return f"c = ppl.scope({s.id}, {s.id!r})(c, x, k)\n"

    def scale(self, s):
        factor = f"1.2 + 0.1 * x + {self.float(s.id)}" if s.arg == "x" else f"1.5 + 0.1 * {self.float(s.id)}"
        sites = "" if s.sites is None else f", sites={s.sites!r}"
        return f"c = ppl.scale({s.id}, {factor}{sites})(c, x, k)\n"

    def mask(self, s):
        keep = "k % 2 == 0" if s.arg == "k" else f"{self.int(s.id)} % 2 == 0"
        sites = "" if s.sites is None else f", sites={s.sites!r}"
        return f"c = ppl.mask({s.id}, {keep}{sites})(c, x, k)\n"

    def given(self, s):
        entries = []
        for name, family, shape in s.values:
            key = f"{s.id}:{name}"
            raw = self.int(key, shape) if FAMILIES[family].discrete else self.float(key, shape)
            entries.append(f"{name!r}: inside({family!r}, {raw})")
        return f"c = ppl.{s.kind}({s.id}, {{{', '.join(entries)}}})(c, x, k)\n"

    def blocked(self, s):
        rows = {v: self.lane_values(s, v) for v in s.maps} or {"_": f"jnp.zeros({s.size})"}
        if "x" in rows and s.axis:
            rows["x"] = f"jnp.stack([{rows['x']}, 2.0 * ({rows['x']})], axis=1)"
        x = "x.sum()" if "x" in rows and s.axis else "x"
        one = f"lambda {', '.join(rows)}: {s.id}(c, {x}, k)"
        return f"ppl.blocked(lambda rows: jax.vmap({one})(*rows), {s.rows})(({', '.join(rows.values())},))\n"

    def lane_values(self, s, v):
        if v == "k":
            return f"k + {self.int(s.id, (s.size,))}"
        return f"{v} + {self.float(f'{s.id}{v}', (s.size,))}"

    def vmap(self, s):
        if s.rows is not None:
            return self.blocked(s)
        if not s.maps:
            return f"c = jax.vmap(lambda _: {s.id}(c, x, k))(jnp.zeros({s.size})).mean()\n"
        axes, args = [], []
        for v in VARIABLES:
            if v not in s.maps:
                axes.append(None)
                args.append(v)
            else:
                axes.append(s.axis if v == "x" else 0)
                args.append(self.lane_values(s, v))
        if "x" in s.maps and s.axis:
            args[1] = f"jnp.stack([{args[1]}, 2.0 * ({args[1]})])"
            fn = f"lambda c, x, k: {s.id}(c, x.sum(), k)"
        else:
            fn = s.id
        return f"c = jax.vmap({fn}, in_axes={tuple(axes)!r})({', '.join(args)}).mean()\n"

    def scan(self, s):
        x, k = "x", "k"
        start = f"vary(c, {s.carry!r})" if s.carry else "c"
        xs, names = [], []
        if "x" in s.over:
            xs.append(self.float(s.id, (s.length,)))
            names.append("dx")
            x = "x + dx"
        if "k" in s.over:
            xs.append(self.int(s.id, (s.length,)))
            names.append("dk")
            k = "k + dk"
        unpack = f"{', '.join(names)}, = step" if names else "pass"
        return (
            f"def step_{s.id}(c, step):\n    {unpack}\n    return {s.id}(c, {x}, {k}), None\n"
            f"c, _ = lax.scan(step_{s.id}, {start}, ({''.join(f'{v}, ' for v in xs)}), length={s.length}, "
            f"reverse={s.reverse})\n"
        )

    def cond(self, s, nested):
        names = [f"{s.id}_{i}" for i in range(len(s.branches))]
        result = f"vary(c, {s.carry!r})" if s.carry else "c"
        text = "".join(self.function(n, b, nested, result=result) for n, b in zip(names, s.branches, strict=True))
        value = "k" if s.pred == "k" else "ints['flag']"
        if len(names) == 2:
            return f"{text}c = lax.cond({value} % 2 == 0, {names[0]}, {names[1]}, c, x, k)\n"
        return f"{text}c = lax.switch({value} % {len(names)}, [{', '.join(names)}], c, x, k)\n"

    def shard(self, s, nested):
        size = math.prod(self.sizes[a] for a in s.axes)
        first = "".join(f"{v} = {v}[0]\n" for v in s.split)
        specs, args = [], []
        for v in VARIABLES:
            if v in s.split:
                own = self.int(s.id, (size,)) if v == "k" else self.float(f"{s.id}{v}", (size,))
                specs.append(f"P({s.axes!r})")
                args.append(f"put({v} + {own}, {s.axes!r})")
            else:
                specs.append("P()")
                args.append(v)
        passed = ", data, ints" if nested else ""
        specs += ["P()", "P()"] if nested else []
        text = self.function(s.id, s.body, True, first=first, result=f"settle(c, {s.axes!r})", more=passed)
        options = ["" if nested or self.ambient else "mesh=mesh, "]
        if set(s.axes) != self.whole:
            options.append(f"axis_names={set(s.axes)!r}, ")
        return (
            f"{text}c = jax.shard_map({s.id}, {''.join(options)}in_specs=({', '.join(specs)}), out_specs=P())"
            f"({', '.join(args)}{passed})\n"
        )

    def site(self, s: Site) -> str:
        options = ""
        if s.spec is not None:
            entries = [None] * s.at + [s.spec[0] if len(s.spec) == 1 else s.spec] if s.spec else []
            options += f", spec=P({', '.join(map(repr, entries))})"
        keep = ""
        if s.mask is not None:
            keep = "k % 2 == 0" if s.mask == "k" else f"{self.int(f'{s.name}m', s.batch)} % 2 == 0"
            options += f", mask={keep}"
        m = {"c": "0.5 * c", "x": "0.3 * x", "data": "" if s.arg != "data" else self.float(s.name)}[s.arg]
        if isinstance(s, Factor):
            return f"ppl.factor({s.name!r}, -0.5 * (spread({m}, {s.batch}) - 0.3) ** 2{options})\n"
        if isinstance(s, Deterministic):
            return f"ppl.deterministic({s.name!r}, jnp.sin(spread({m}, {s.batch})){options})\n"
        if isinstance(s, Sample):
            start = f"c = mix(c, ppl.sample({s.name!r}, " if s.mix else f"ppl.sample({s.name!r}, "
            return f"{start}make({s.dist!r}, spread({m}, {s.batch})){options}){')' if s.mix else ''}\n"
        assert isinstance(s, Observe)
        family = FAMILIES[s.dist]
        shape = (*s.batch, *family.event)
        if family.discrete:
            raw = self.int(f"{s.name}y", shape) + (" + k" if s.value == "k" else "")
        else:
            raw = self.float(f"{s.name}y", shape) + {"data": "", "x": " + 0.5 * x", "c": " + 0.5 * c"}[s.value]
        value = f"inside({s.dist!r}, {raw})"
        if s.poisoned:
            value = f"poisoned({value}, {keep}, {len(family.event)})"
        params = f"spread({m}, {() if s.wide else s.batch})"
        return f"ppl.observe({s.name!r}, make({s.dist!r}, {params}), {value}{options})\n"


def vary(c, axes):
    """Types ``c`` as varying over ``axes``."""
    missing = tuple(a for a in axes if a not in jax.typeof(c).manual_axis_type.varying)
    return lax.pcast(c, missing, to="varying") if missing else c


def settle(c, axes):
    """The mean of ``c`` over those of ``axes`` that it varies over."""
    over = tuple(a for a in axes if a in jax.typeof(c).manual_axis_type.varying)
    return lax.pmean(c, over) if over else c


def poisoned(value, keep, event_dim):
    """``value`` with NaN where it is masked."""
    keep = jnp.broadcast_to(keep, value.shape[: value.ndim - event_dim])
    return jnp.where(keep.reshape(*keep.shape, *[1] * event_dim), value, jnp.nan)


class Compiled:
    """A program as a function, its data, and its mesh."""

    def __init__(self, program: Program):
        printer = Printer(program)
        self.source = printer.source
        rng = np.random.default_rng(zlib.crc32(self.source.encode()))
        self.data = {name: jnp.asarray(0.7 * rng.standard_normal(shape)) for name, shape in printer.floats.items()}
        self.ints = {name: jnp.asarray(rng.integers(0, 6, shape)) for name, shape in printer.ints.items()}
        sizes = dict(program.mesh)
        kind = AxisType.Explicit if program.explicit else AxisType.Auto
        count = math.prod(sizes.values())
        self.mesh = jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=jax.devices()[:count]
        )

        def put(value, axes):
            if not program.explicit:
                return value
            inside = not jax.sharding.get_abstract_mesh().empty
            return jax.reshard(value, P(axes) if inside else NamedSharding(self.mesh, P(axes)))

        filename = f"<program {zlib.crc32(self.source.encode()):08x}>"
        names = {
            **{"jax": jax, "jnp": jnp, "lax": lax, "P": P, "ppl": ppl, "mesh": self.mesh, "put": put},
            **{"mix": mix, "spread": spread, "vary": vary, "settle": settle, "poisoned": poisoned},
            "make": lambda family, m: FAMILIES[family].make(m),
            "inside": lambda family, raw: FAMILIES[family].inside(raw),
        }
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        exec(compile(self.source, filename, "exec"), names)
        self.model = names["model"]

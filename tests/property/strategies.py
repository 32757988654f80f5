"""How programs are drawn: small, and such that JAX and the library accept them."""

import dataclasses
import math
from typing import Any

from hypothesis import strategies as st

from tests.property import programs as ast
from tests.property.distributions import CONTINUOUS, DISCRETE, FAMILIES, OBSERVABLE
from tests.property.plain import Plain

type Axes = frozenset[str]
NOWHERE: Axes = frozenset()
MAX_DEPTH = 4
MAX_VISITS = 12
MAX_STATEMENTS = 7
# Left out, as its gradient waits for ever (in JAX alone, too): a cond that differs from shard to shard.
VARYING_BRANCHES = True


@dataclasses.dataclass(frozen=True)
class Where:
    """What is known where a statement is to stand.

    Attributes:
        varies: the axes that JAX says each variable varies over.
        differs: those over which it may truly differ.
        limit: the axes that ``c`` may come to vary over; None: any.
        own: the axes of the shard_maps around, in order.
        reached: the axes over which it varies whether this place is reached.
        lanes: whether a vmap stands between here and a shard_map.
        visits: how often this place is visited.
        depth: how many blocks are around.
        collectives: whether all shards come here together.
        shards: how many shard_maps are around.
    """

    varies: dict[str, Axes]
    differs: dict[str, Axes]
    limit: Axes | None = None
    own: tuple[str, ...] = ()
    reached: Axes = NOWHERE
    lanes: bool = False
    visits: int = 1
    depth: int = 0
    collectives: bool = True
    shards: int = 0

    def but(self, **fields: Any) -> "Where":
        return dataclasses.replace(self, **fields)

    def with_c(self, varies: Axes, differs: Axes) -> "Where":
        return self.but(varies={**self.varies, "c": varies}, differs={**self.differs, "c": differs})

    def allows(self, axes: Axes) -> bool:
        """Whether ``c`` may come to vary over ``axes``."""
        return self.limit is None or axes <= self.limit


class Drawer:
    """Draws one program."""

    def __init__(self, draw: Any):
        self.draw = draw
        self.count = 0
        self.left = MAX_STATEMENTS
        self.mesh = draw(st.sampled_from([(("data", 2),), (("data", 4),), (("a", 2), ("b", 2)), (("data", 1),)]))
        self.sizes = dict(self.mesh)

    def program(self) -> ast.Program:
        start = Where(dict.fromkeys("cxk", NOWHERE), dict.fromkeys("cxk", NOWHERE))
        body, _ = self.body(start)
        explicit, ambient = self.flag(), self.flag()
        return ast.Program(body, self.mesh, explicit, ambient)

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def rarely(self) -> bool:
        return self.draw(st.integers(0, 4)) == 4

    def pick(self, options):
        return self.draw(st.sampled_from(list(options)))

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def body(self, here: Where) -> tuple[ast.Body, Where]:
        statements = []
        wanted = self.draw(st.integers(1, 3))
        for _ in range(wanted):
            if self.left <= 0 and statements:
                break
            self.left -= 1
            s, here = self.statement(here)
            statements.append(s)
        return tuple(statements), here

    def statement(self, here: Where):
        kinds = ["sample", "observe", "factor", "deterministic"]
        if here.depth < MAX_DEPTH:
            kinds += ["jit", "checkpoint", "scope", "scale", "mask", "given", "vmap", "vmap", "scan", "scan", "cond"]
            if self.open_axes(here) and here.collectives:
                kinds += ["shard"] * 4
            if not here.own:
                kinds += ["twice"]
        if here.own and here.collectives and here.varies["c"]:
            kinds += ["collective"]
        # Deep programs are what this is for: blocks are twice as likely as sites, as long as there is room.
        kinds = [*kinds[:4], *kinds[4:] * 2]
        return getattr(self, self.pick(kinds))(here)

    def open_axes(self, here: Where):
        return [a for a in self.sizes if a not in here.own] if here.visits * 2 <= MAX_VISITS else []

    # Sites

    def site_fields(self, here: Where, *, latent: bool, arg: str, batch, mask, extra: Axes = NOWHERE, real=None):
        """``spec`` and ``at`` that are allowed, and the axes that the site then varies over."""
        varies = (here.varies[arg] if arg != "data" else NOWHERE) | extra
        differs = (here.differs[arg] if arg != "data" else NOWHERE) | (extra if real is None else real)
        if mask == "k":
            varies, differs = varies | here.varies["k"], differs | here.differs["k"]
        own = here.own
        options: list[tuple[str, ...] | None] = []
        if not own:
            options = [None]
        else:
            if latent:
                needed = varies | here.reached
                if varies and here.reached <= varies:
                    options.append(None)
            else:
                needed = differs | here.reached
                if varies or not here.lanes:
                    options.append(None)
            free = [a for a in own if a not in needed]
            options.append(tuple(a for a in own if a in needed))
            if free:
                more = self.pick(free)
                options.append(tuple(a for a in own if a in needed or a == more))
        spec = self.pick(options)
        at = 0
        if spec and len(spec) == 1 and here.shards == 1 and len(batch) > 1:
            at = self.pick(range(len(batch)))
        axes = frozenset(spec) if spec is not None else varies | (NOWHERE if latent else here.reached)
        return {"spec": spec, "at": at}, axes

    def shape(self):
        return self.pick([(), (), (2,), (1, 2), (2, 1)])

    def mask_kind(self):
        return self.pick([None, None, "k", "fixed"])

    def sample(self, here: Where, name: str | None = None, support: str | None = None, batch=None):
        family = self.pick(CONTINUOUS * 3 + DISCRETE) if support is None else self.pick(_of(support))
        batch = self.shape() if batch is None else batch
        mask, arg = self.mask_kind(), self.pick(["c", "x", "data"])
        fields, axes = self.site_fields(here, latent=True, arg=arg, batch=batch, mask=mask)
        mix = here.allows(here.varies["c"] | axes)
        site = ast.Sample(name or self.name("s"), arg, batch, mask=mask, dist=family, mix=mix, **fields)
        if mix:
            here = here.with_c(here.varies["c"] | axes, here.differs["c"] | axes)
        return site, here

    def observe(self, here: Where):
        family = self.pick(OBSERVABLE)
        discrete = FAMILIES[family].discrete
        batch, mask, arg = self.shape(), self.mask_kind(), self.pick(["c", "x", "data"])
        value = self.pick(["k", "data"] if discrete else ["x", "data", "c"])
        extra = here.varies[value] if value != "data" else NOWHERE
        real = here.differs[value] if value != "data" else NOWHERE
        fields, _ = self.site_fields(here, latent=False, arg=arg, batch=batch, mask=mask, extra=extra, real=real)
        poisoned = mask is not None and not discrete and self.flag()
        wide = self.rarely()
        return ast.Observe(
            self.name("o"), arg, batch, mask=mask, dist=family, value=value, wide=wide, poisoned=poisoned, **fields
        ), here

    def factor(self, here: Where):
        batch, arg = self.shape(), self.pick(["c", "x", "data"])
        fields, _ = self.site_fields(here, latent=False, arg=arg, batch=batch, mask=None)
        return ast.Factor(self.name("f"), arg, batch, **fields), here

    def deterministic(self, here: Where):
        batch, arg = self.shape(), self.pick(["c", "x", "data"])
        fields, _ = self.site_fields(here, latent=False, arg=arg, batch=batch, mask=None)
        return ast.Deterministic(self.name("d"), arg, batch, **fields), here

    def collective(self, here: Where):
        axes = tuple(a for a in here.own if a in here.varies["c"])
        kind = self.pick(["pmean", "gather"])
        gone = here.varies["c"] - set(axes) if kind == "pmean" else here.varies["c"]
        return ast.Collective(kind, axes), here.with_c(gone, here.differs["c"] - set(axes))

    # Blocks

    def block(self, cls, prefix, here, inside=None, **fields):
        body, after = self.body((inside or here).but(depth=here.depth + 1))
        return cls(self.name(prefix), body, **fields), here.with_c(after.varies["c"], after.differs["c"])

    def jit(self, here):
        return self.block(ast.Jit, "jit", here)

    def checkpoint(self, here):
        return self.block(ast.Checkpoint, "ckpt", here)

    def scope(self, here):
        return self.block(ast.Scope, "in", here)

    def twice(self, here):
        return self.block(ast.Twice, "two", here, here.but(visits=here.visits * 2))

    def scale(self, here):
        arg = "data" if here.varies["x"] else self.pick(["data", "x"])
        s, here = self.block(ast.Scale, "scale", here, arg=arg)
        return dataclasses.replace(s, sites=self.some_sites(s.body)), here

    def mask(self, here):
        arg = "data" if here.varies["k"] else self.pick(["data", "k"])
        s, here = self.block(ast.Mask, "mask", here, arg=arg)
        return dataclasses.replace(s, sites=self.some_sites(s.body)), here

    def infos(self, body):
        """The sites of a body as a model of its own."""
        return Plain(ast.Program(body, self.mesh), {"c": 0.0, "x": 0.0}, {"k": 0, "flag": 0}).infos

    def some_sites(self, body):
        names = [n for n, i in self.infos(body).items() if i.kind != "deterministic"]
        return None if not names or self.flag() else (self.pick(names),)

    def given(self, here):
        s, after = self.block(ast.Given, "given", here)
        kind = self.pick(["condition", "do"])
        # On shards an observation lies as its parameters do; one that is set lies as its value does.
        kinds = ["sample"] if kind == "condition" or here.own else ["sample", "observe"]
        families = _families(s.body)
        options = {
            name: (name, families[name.split("/")[-1]], info.shape)
            for name, info in self.infos(s.body).items()
            if info.kind in kinds and families[name.split("/")[-1]] != "uniform"
        }
        values = tuple(v for v in options.values() if self.flag())
        return dataclasses.replace(s, kind=kind, values=values), after

    def vmap(self, here):
        size = self.pick([2, 3, 1]) if here.visits * 3 <= MAX_VISITS else 1
        maps = self.pick([("x", "k"), ("c", "x", "k"), ("x",), ("c",), ("k",), ()])
        inside = here.but(visits=here.visits * size, lanes=bool(here.own))
        rows = self.pick([None, None, 1, 2])
        s, after = self.block(ast.Vmap, "vmap", here, inside, size=size, maps=maps, axis=self.pick([0, 1]), rows=rows)
        return s, after if rows is None else here

    def scan(self, here):
        length = self.pick([2, 3, 1, 0]) if here.visits * 3 <= MAX_VISITS else 1
        carry = self.carry(here, NOWHERE)
        inside = here.with_c(carry, carry).but(visits=here.visits * max(length, 1), limit=carry)
        over = self.pick([("x", "k"), ("x",), ("k",), ()])
        s, _ = self.block(
            ast.Scan, "scan", here, inside, length=length, over=over, reverse=self.rarely(), carry=self.ordered(carry)
        )
        return s, here.with_c(carry, carry)

    def cond(self, here):
        pred = self.pick(["k", "flag"])
        varies = here.varies["k"] if pred == "k" else NOWHERE
        if not here.allows(here.varies["c"] | varies) or (varies and not VARYING_BRANCHES):
            pred, varies = "flag", NOWHERE
        carry = self.carry(here, varies)
        inside = here.but(
            limit=carry,
            depth=here.depth + 1,
            reached=here.reached | varies,
            collectives=here.collectives and not varies,
        )
        count = self.pick([2, 2, 3])
        shared = (self.name("s"), self.pick(sorted({FAMILIES[n].support for n in CONTINUOUS})), self.shape())
        share = self.flag()
        first, at = self.sample(inside, *shared) if share else (None, inside)
        branches = []
        for _ in range(count):
            if share and not here.own:  # on a mesh, what lies on it in one way in all branches
                first, at = self.sample(inside, *shared)
            body, _ = self.body(at)
            branches.append((first, *body) if share else body)
        s = ast.Cond(self.name("cond"), tuple(branches), pred, self.ordered(carry))
        return s, here.with_c(carry, carry)

    def carry(self, here, least: Axes) -> Axes:
        least = least | here.varies["c"]
        most = frozenset(here.own) if here.limit is None else here.limit
        return most if most > least and self.flag() else least

    def ordered(self, axes):
        return tuple(a for a in self.sizes if a in axes)

    def shard(self, here):
        axes = self.open_axes(here)
        if len(axes) > 1 and self.flag():
            axes = [self.pick(axes)]
        axes = tuple(axes)
        split = self.pick([("x", "k"), ("x",), ("c", "x", "k"), ("k",), ()])
        more = frozenset(axes)
        varies = {v: a | more if v in split else a for v, a in here.varies.items()}
        differs = {v: a | more if v in split else a for v, a in here.differs.items()}
        count = math.prod(self.sizes[a] for a in axes)
        inside = here.but(
            varies=varies,
            differs=differs,
            limit=None if here.limit is None else here.limit | more,
            own=(*here.own, *axes),
            visits=here.visits * count,
            shards=here.shards + 1,
            lanes=here.lanes,
        )
        s, after = self.block(ast.Shard, "shard", here, inside, axes=axes, split=split)
        return s, here.with_c(after.varies["c"] - more, after.differs["c"] - more)


def _of(support):
    return [name for name in CONTINUOUS if FAMILIES[name].support == support]


def _families(body) -> dict[str, str]:
    found = {}
    for s in body:
        if isinstance(s, ast.Sample | ast.Observe):
            found[s.name] = s.dist
        elif isinstance(s, ast.Block):
            found |= _families(s.body)
        elif isinstance(s, ast.Cond):
            for branch in s.branches:
                found |= _families(branch)
    return found


@st.composite
def programs(draw) -> ast.Program:
    """A program, and the mesh that it runs on."""
    return Drawer(draw).program()

"""Programs that once failed, made small."""

from tests.property.programs import Cond, Deterministic, Given, Observe, Program, Sample, Scale, Shard, Vmap

_PIECE = Sample("s1", arg="data", batch=(2, 1), spec=("data",), at=1, dist="tfp_diagonal", mix=False)

EXAMPLES = {
    "TFP in a vmap": Program((Vmap("vmap1", (Sample("s1", arg="x", dist="tfp_gamma"),)),)),
    "a loop in lanes on shards": Program(
        (Vmap("vmap1", (Shard("shard1", (Sample("s1", arg="x", dist="gamma"), Sample("s2", "x", dist="poisson"))),)),)
    ),
    "lanes on shards": Program(
        (Shard("shard1", (Vmap("vmap1", (Sample("s1", arg="data", spec=("data",), dist="binomial"),)),)),)
    ),
    "conditioned in scanned lanes": Program(
        (
            Given(
                "given1",
                (Vmap("vmap1", (Sample("s1", "x"), Observe("o1", "c", (2,), mask="fixed", poisoned=True))),),
                values=(("s1", "normal", (2,)),),
            ),
        )
    ),
    "a shared site, scaled on the shards": Program(
        (Shard("shard1", (Scale("scale1", (Sample("s1", arg="data", spec=()),)),)),)
    ),
    "shards in a branch": Program(
        (
            Cond(
                "cond1",
                ((Shard("shard1", (Sample("s1", arg="x"),)),), (Deterministic("d1", arg="x"),)),
                pred="flag",
            ),
        ),
        explicit=True,
        ambient=True,
    ),
    "branches of one name in lanes, over constants": Program(
        (
            Vmap(
                "vmap1",
                (
                    Cond(
                        "cond1",
                        (
                            (Observe("o1", dist="mvn"),),
                            (Sample("s1", dist="vector"),),
                            (Sample("s1", dist="vector"), Sample("s2", arg="x", batch=(1, 2), mask="k")),
                        ),
                    ),
                ),
            ),
        )
    ),
    "one TFP distribution in both branches on shards": Program(
        (Shard("shard1", (Cond("cond1", ((_PIECE,), (_PIECE,)), pred="flag"),), split=()),)
    ),
}

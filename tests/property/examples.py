"""Programs that once failed, made small."""

from tests.property.programs import Cond, Deterministic, Given, Observe, Program, Sample, Scale, Shard, Vmap

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
}

FAILING = {
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
}

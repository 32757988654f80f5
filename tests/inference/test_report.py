"""The diagnostics of a run, on draws whose faults are known, and against ArviZ's own functions."""

import io
import re

import arviz_base
import arviz_stats
import numpy as np
import pytest
import xarray
from rich.console import Console

from ppleffects.inference.diagnostics import MAX_SCALARS
from ppleffects.inference.report import diagnose

RNG = np.random.default_rng(0)
GOOD = RNG.normal(size=(4, 500, 2))
ENERGY = RNG.normal(size=(4, 500))
LP = -137.0 - 0.5 * RNG.chisquare(8, size=(4, 500))  # as a Gaussian in eight dimensions has it
COUNTS = {"num_transitions": 2000, "num_diverging": 0, "num_saturated": 0, "lp": LP}
ROWS = ["divergences", "saturated trees", "R-hat", "bulk ESS", "tail ESS", "E-BFMI", "stuck chains", "NaNs"]


def in_chain(array, chain, values):
    """A copy in which one chain, or some, has other values."""
    array = array.copy()
    array[chain] = values
    return array


def verdicts(report):
    """The column "ok" of the printed table, by diagnostic."""
    lines = report.text().splitlines()
    table = lines[1 : 2 + len(ROWS)]
    start = table[0].index("ok")
    return {row[2:].split("  ")[0]: row[start : start + 3].strip() for row in table[1:]}


def test_good_draws_have_no_problems():
    report = diagnose({"x": GOOD, "mu": GOOD[..., 0]}, ENERGY, **COUNTS)
    assert report.problems == ()
    assert report.num_draws == 2000
    assert report.num_scalars == report.num_scalars_checked == 3
    assert verdicts(report) == dict.fromkeys(ROWS, "yes")
    assert len(report.text().splitlines()) == 2 + len(ROWS)


def test_agrees_with_arviz():
    walk = np.cumsum(GOOD, axis=1) * 0.05 + GOOD
    report = diagnose({"x": walk}, ENERGY, **COUNTS)
    tree = arviz_base.from_dict({"posterior": {"x": walk}, "sample_stats": {"energy": ENERGY}})
    rhat, bulk = arviz_stats.rhat(tree).x.values, arviz_stats.ess(tree, method="bulk").x.values
    tail = arviz_stats.ess(tree, method="tail", prob=(0.05, 0.95)).x.values
    bfmi = arviz_stats.bfmi(tree).energy.values
    assert (report.max_rhat, report.max_rhat_name) == (pytest.approx(rhat.max()), f"x[{rhat.argmax()}]")
    assert (report.min_ess_bulk, report.min_ess_bulk_name) == (pytest.approx(bulk.min()), f"x[{bulk.argmin()}]")
    assert (report.min_ess_tail, report.min_ess_tail_name) == (pytest.approx(tail.min()), f"x[{tail.argmin()}]")
    assert report.min_bfmi == pytest.approx(bfmi.min())
    text = report.text()
    assert re.search(rf"R-hat +{rhat.max():.3f}  <= 1.01  NO +x\[{rhat.argmax()}\]\n", text)
    assert re.search(rf"bulk ESS +{bulk.min():.0f}  >= 400 +(NO|yes) +x\[{bulk.argmin()}\]\n", text)
    assert re.search(rf"tail ESS +{tail.min():.0f}  >= 400 +(NO|yes) +x\[{tail.argmin()}\]\n", text)
    assert re.search(rf"E-BFMI +{bfmi.min():.2f}  >= 0.3 +yes +chain {bfmi.argmin()}\n", text)


# Draws with one fault, the rows that it fails, and what to say of it.
WALK = np.cumsum(GOOD, axis=1)
FAULTS = {
    "divergences": (
        {"num_diverging": 7},
        ["divergences"],
        r"7 divergences \(0.3 % .*NUTS\(target_accept=0.95\).*repar",
    ),
    "one divergence": ({"num_diverging": 1}, ["divergences"], r"^1 divergence \(under 0.1 %"),
    "trees": ({"num_saturated": 9}, ["saturated trees"], r"9 trees ended by .*ppl.NUTS\(max_tree_depth=12\)"),
    "nan": ({"posterior": {"x": GOOD, "y": np.where(GOOD > 3, np.nan, GOOD)}}, ["NaNs"], r"\d+ NaNs in y, whose"),
    "rhat": (
        {"posterior": {"x": GOOD + np.array([0.0, 0.0, 0.0, 0.3])[:, None, None] * [0, 1]}},
        ["R-hat"],
        r"R-hat 1\.\d+ > 1.01 for x\[1\]: the chains disagree\. .*num_samples=.*init=",
    ),
    "ess": ({"posterior": {"x": WALK}}, ["R-hat", "bulk ESS", "tail ESS"], r"bulk ESS \d+ < 400 for x\[\d\].*help lit"),
    "bfmi": ({"energy": np.cumsum(ENERGY, axis=1)}, ["E-BFMI"], r"E-BFMI 0\.\d+ < 0.3 in chains 0, 1, 2, 3: .*reparam"),
    "bfmi of one": (
        {"energy": in_chain(ENERGY, 2, np.cumsum(ENERGY[2]))},
        ["E-BFMI"],
        r"E-BFMI 0\.\d+ < 0.3 in chain 2:",
    ),
    "still": (
        {"lp": in_chain(LP, 1, LP[1, 0]), "posterior": {"x": in_chain(GOOD, 1, GOOD[1, 0])}},
        ["R-hat", "bulk ESS", "stuck chains"],
        r"^chain 1 hardly moved in the last 250 draws: .*target_accept=0.95.*init=",
    ),
    "remote mode": (
        {"lp": in_chain(LP, [3], LP[3] - 40)},
        ["stuck chains"],
        r"^chain 3 stayed at far lower .* than chain \d \(-18\d\S* in chain 3, -14\d\S* in chain \d\).*init=\"mode\"",
    ),
    "few": (
        {"posterior": {"x": GOOD[:, :3]}, "energy": ENERGY[:, :3]},
        ["R-hat"],
        r"3 draws of each chain are too few",
    ),
    "constant": ({"posterior": {"x": np.ones((4, 500))}}, ["R-hat"], r"no scalar is finite and varies"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name):
    changed, failed, message = FAULTS[name]
    report = diagnose(**({"posterior": {"x": GOOD}, "energy": ENERGY} | COUNTS | changed))
    found = verdicts(report)
    assert [row for row in ROWS if found[row] == "NO"] == failed
    matching = [problem for problem in report.problems if re.search(message, problem)]
    assert len(matching) == 1
    assert " ".join(matching[0].split()) in " ".join(report.text().split())
    assert report.attrs()["problems"] == list(report.problems)


def test_too_few_draws_are_told_as_a_number():
    rho = 0.9  # an autoregressive series: ESS = n (1 - rho) / (1 + rho), which is 105 of 2000
    series = np.zeros((4, 500))
    for draw in range(1, 500):
        series[:, draw] = rho * series[:, draw - 1] + GOOD[:, draw, 0]
    report = diagnose({"x": series}, ENERGY, **COUNTS)
    (problem,) = [p for p in report.problems if "ESS" in p]
    asked = int(re.search(r"num_samples=(\d+) or so", problem)[1])
    assert asked == pytest.approx(500 * 400 / min(report.min_ess_bulk, report.min_ess_tail), rel=0.1)
    assert 500 * 400 / 105 / 2 < asked < 500 * 400 / 105 * 2


# Log-densities by chain, and the chains that are stuck.
MODES = {
    "none": (LP, []),
    "one far below": (in_chain(LP, [0], LP[0] - 40), [0]),
    "three far below": (in_chain(LP, [0, 1, 2], LP[:3] - 40), [0, 1, 2]),
    "two still": (in_chain(LP, [1, 2], -500.0), [1, 2]),
    "one still far above": (in_chain(LP, 2, 1e3), [2]),
    "one still, one far below": (in_chain(in_chain(LP, 2, 1e3), [3], LP[3] - 40), [2, 3]),
    "came late": (np.where(np.arange(500) < 200, LP - 40, LP), []),  # only the later half counts
    "close below": (in_chain(LP, [0], LP[0] - 4), []),  # overlaps
    "a wide one below": (in_chain(LP, [0], -200 + 30 * GOOD[0, :, 0]), []),  # overlaps
    "moves now and then": (in_chain(LP, 0, np.repeat(LP[0, ::10], 10)), []),  # at every tenth draw
    "moves hardly": (in_chain(LP, 0, np.repeat(LP[0, ::50], 50)), [0]),
    "one draw": (LP[:, :1], []),
    "one chain": (LP[:1], []),
    "one chain, still": (in_chain(LP[:1], 0, -5.0), [0]),
}


@pytest.mark.parametrize("name", MODES)
def test_stuck_chains(name):
    lp, expected = MODES[name]
    report = diagnose({}, ENERGY[: len(lp)], **(COUNTS | {"lp": lp}))
    assert report.stuck_chains == tuple(expected)
    assert report.attrs()["stuck_chains"] == expected
    where = "" if not expected else ("chain " if len(expected) == 1 else "chains ") + ", ".join(map(str, expected))
    if lp.shape[1] > 1:
        assert re.search(rf"stuck chains +{len(expected)}  0 +\w+ *{where}\n", report.text())


def test_a_log_density_that_shows_no_move_is_no_proof():
    lp = np.full((4, 500), -1e9, np.float32)  # the next number is 64 away
    assert diagnose({"x": GOOD}, ENERGY, **(COUNTS | {"lp": lp})).stuck_chains == ()
    assert diagnose({"x": in_chain(GOOD, 3, 1.0)}, ENERGY, **(COUNTS | {"lp": lp})).stuck_chains == (3,)


def test_without_log_densities_chains_are_not_judged():
    report = diagnose({"x": GOOD}, ENERGY, **(COUNTS | {"lp": None}))
    assert verdicts(report) == dict.fromkeys(ROWS, "yes") | {"stuck chains": "-"}


def test_one_chain_is_compared_with_itself():
    drift = GOOD[:1] + np.linspace(0, 5, 500)[None, :, None]
    settings = COUNTS | {"lp": LP[:1]}
    assert diagnose({"x": GOOD[:1]}, ENERGY[:1], **settings).max_rhat < 1.02
    assert diagnose({"x": drift}, ENERGY[:1], **settings).max_rhat > 1.5


def test_chains_that_stand_still_each_elsewhere():
    still = np.broadcast_to(GOOD[:, :1], GOOD.shape)
    report = diagnose({"x": still}, ENERGY, **(COUNTS | {"lp": np.broadcast_to(LP[:, :1], LP.shape)}))
    assert report.max_rhat > 1e6
    assert report.stuck_chains == (0, 1, 2, 3)


def test_of_many_scalars_the_worst_are_judged():
    x = RNG.normal(size=(2, 20, 3, MAX_SCALARS))
    x[1, :, 1, 321] += 5.0
    report = diagnose({"y": RNG.normal(size=(2, 20)), "x": x, "zero": np.zeros((2, 20, 9))}, ENERGY[:2, :20], **COUNTS)
    assert report.num_scalars_checked == MAX_SCALARS
    head = f"40 draws of {3 * MAX_SCALARS + 10} scalars; R-hat and ESS of the {MAX_SCALARS} whose chains differ most"
    assert report.text().startswith(head)
    assert report.max_rhat_name == "x[1, 321]"
    assert report.max_rhat == pytest.approx(
        float(arviz_stats.rhat(arviz_base.from_dict({"posterior": {"x": x[:, :, 1, 321]}})).x)
    )


def test_constants_do_not_count():
    report = diagnose({"x": GOOD, "zero": np.zeros((4, 500)), "flag": GOOD > 0}, ENERGY, **COUNTS)
    assert report.problems == ()


def test_attributes_survive_a_file(tmp_path):
    for lp in (LP, in_chain(LP, [0, 3], LP[:2] - 40), in_chain(LP, [2], LP[2] - 40)):
        attrs = diagnose({"x": WALK}, ENERGY, **(COUNTS | {"lp": lp})).attrs()
        tree = xarray.DataTree(xarray.Dataset(attrs=attrs))
        tree.to_zarr(tmp_path / "run.zarr", mode="w", consolidated=False)
        assert xarray.open_datatree(tmp_path / "run.zarr", engine="zarr", consolidated=False).attrs == attrs
        for value in attrs.values():
            kinds = {type(entry) for entry in value} if isinstance(value, list) else {type(value)}
            assert kinds <= {int} or kinds <= {float} or kinds <= {str}


def test_the_table_fits_a_terminal_of_eighty_columns():
    report = diagnose({"x": WALK}, np.cumsum(ENERGY, axis=1), **(COUNTS | {"num_diverging": 3, "num_saturated": 2}))
    out = io.StringIO()
    Console(file=out, width=80).print(report.text(), highlight=False)
    assert out.getvalue().splitlines() == report.text().splitlines()
    assert max(map(len, report.text().splitlines())) < 80

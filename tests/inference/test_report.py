"""The diagnostics of a run, on draws whose faults are known, and against ArviZ's own functions."""

import re

import arviz_base
import arviz_stats
import numpy as np
import pytest

from ppleffects.inference.report import MAX_SCALARS, diagnose

RNG = np.random.default_rng(0)
GOOD = RNG.normal(size=(4, 500, 2))
ENERGY = RNG.normal(size=(4, 500))
COUNTS = {"num_transitions": 2000, "num_diverging": 0, "num_saturated": 0}


def test_good_draws_have_no_problems():
    report = diagnose({"x": GOOD, "mu": GOOD[..., 0]}, ENERGY, **COUNTS)
    assert report.problems == ()
    assert report.num_draws == 2000
    assert report.num_scalars == report.num_scalars_checked == 3
    assert report.attrs()["problems"] == []
    assert report.text().startswith("2000 draws of 3 scalars: R-hat <= 1.0")


def test_agrees_with_arviz():
    walk = np.cumsum(GOOD, axis=1) * 0.05 + GOOD
    report = diagnose({"x": walk}, ENERGY, **COUNTS)
    tree = arviz_base.from_dict({"posterior": {"x": walk}, "sample_stats": {"energy": ENERGY}})
    assert report.max_rhat == pytest.approx(float(arviz_stats.rhat(tree).x.max()))
    assert report.min_ess_bulk == pytest.approx(float(arviz_stats.ess(tree, method="bulk").x.min()))
    assert report.min_ess_tail == pytest.approx(float(arviz_stats.ess(tree, method="tail", prob=(0.05, 0.95)).x.min()))
    assert report.min_bfmi == pytest.approx(float(np.min(arviz_stats.bfmi(tree).energy)))


PROBLEMS = {
    "divergences": ({"x": GOOD}, ENERGY, {"num_diverging": 7}, r"7 divergences \(0.3 % of transitions\)"),
    "trees": ({"x": GOOD}, ENERGY, {"num_saturated": 9}, r"9 trees ended by max_tree_depth"),
    "nan": ({"x": np.where(GOOD > 3, np.nan, GOOD)}, ENERGY, {}, r"\d+ NaNs among the posterior's values"),
    "rhat": (
        {"x": GOOD + np.array([0.0, 0.0, 0.0, 9.0])[:, None, None] * [0, 1]},
        ENERGY,
        {},
        r"R-hat \d\.\d+ > 1.01 for x\[1\]: the chains disagree",
    ),
    "ess": ({"x": np.cumsum(GOOD, axis=1)}, ENERGY, {}, r"effective sample size .* < 400 for x\[\d\]: run longer"),
    "bfmi": ({"x": GOOD}, np.cumsum(ENERGY, axis=1), {}, r"E-BFMI 0\.\d+ < 0.3"),
    "few": ({"x": GOOD[:, :3]}, ENERGY[:, :3], {}, r"R-hat could not be computed"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problem_is_named(name):
    posterior, energy, counts, message = PROBLEMS[name]
    report = diagnose(posterior, energy, **(COUNTS | counts))
    assert re.search(message, report.text())
    assert any(re.search(message, problem) for problem in report.problems)


def test_one_chain_is_compared_with_itself():
    drift = GOOD[:1] + np.linspace(0, 5, 500)[None, :, None]
    assert diagnose({"x": GOOD[:1]}, ENERGY[:1], **COUNTS).max_rhat < 1.02
    assert diagnose({"x": drift}, ENERGY[:1], **COUNTS).max_rhat > 1.5


def test_many_scalars_are_sampled_and_that_is_said():
    report = diagnose({"x": RNG.normal(size=(2, 20, 3 * MAX_SCALARS))}, ENERGY[:2, :20], **COUNTS)
    assert report.num_scalars_checked == MAX_SCALARS
    assert f"{MAX_SCALARS} of {3 * MAX_SCALARS} scalars" in report.text()


def test_constants_do_not_count():
    report = diagnose({"x": GOOD, "zero": np.zeros((4, 500))}, ENERGY, **COUNTS)
    assert report.problems == ()

"""The host's copy of draws and statistics."""

import types

import numpy as np

from ppleffects.inference.store import Phase, Series


def test_series_keeps_each_chain_at_its_own_pace_and_shows_what_all_have():
    series = Series(num_chains=2, num_rows=5)
    first, second, third = np.arange(6.0).reshape(3, 2), np.arange(2.0).reshape(1, 2), np.arange(4.0).reshape(2, 2)
    series.append(0, {"x": first})
    assert series.length == 0
    series.append(1, {"x": second})
    series.append(1, {"x": third})
    series.append(0, {"x": second})
    assert series.length == 3
    np.testing.assert_array_equal(series.arrays()["x"], np.stack([first, np.concatenate([second, third])]))


def transitions(count, start=0):
    ones = np.ones(count)
    infos = {
        "diverging": ones.astype(bool),
        "n_steps": 7 * ones,
        "step_size": ones,
        "lp": start + np.arange(1.0, count + 1),
    }
    return infos, types.SimpleNamespace(posterior={"x": start + np.arange(1.0, count + 1)}, log_likelihood={})


def test_phase_counts_all_transitions_and_keeps_every_second_wherever_the_chunks_end():
    phase = Phase(num_chains=2, num_steps=6, thinning=2)
    phase.append(0, *transitions(6), thinned=False)
    for start, count in ((0, 1), (1, 2), (3, 0), (3, 3)):
        phase.append(1, *transitions(count, start), thinned=False)
    assert phase.num_diverging.tolist() == [6, 6]
    assert phase.num_leapfrogs.tolist() == [42, 42]
    assert phase.num_steps == 6
    assert phase.posterior.arrays()["x"].tolist() == [[2.0, 4.0, 6.0]] * 2
    assert phase.sample_stats.arrays()["lp"].tolist() == [[2.0, 4.0, 6.0]] * 2
    assert phase.log_likelihood.arrays() == {}


def test_phase_takes_rows_that_were_thinned_before():
    phase = Phase(num_chains=1, num_steps=6, thinning=2)
    infos, _ = transitions(6)
    draws = types.SimpleNamespace(posterior={"x": np.array([2.0, 4.0, 6.0, 0.0])}, log_likelihood={})
    phase.append(0, infos, draws, thinned=True)
    assert phase.posterior.arrays()["x"].tolist() == [[2.0, 4.0, 6.0]]

"""The family of errors, and what a message is made of; tests/test_error_catalogue.py has them all, run."""

import subprocess
import sys

from ppleffects import errors


def test_every_error_is_of_one_family():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    family = [c for c in classes if not issubclass(c, Warning)]
    assert all(issubclass(c, errors.PPLError) for c in family)


def test_the_message_shows_what_it_has():
    error = errors.ShapeError("a problem", site="x", source="a.py:3", expected="this", found="that", fix="do so")
    assert str(error) == "site 'x' at a.py:3: a problem\n  expected: this\n  found: that\n  fix: do so"
    assert str(errors.PPLError("alone")) == "alone"
    assert (error.site, error.source, error.problem) == ("x", "a.py:3", "a problem")


def test_import_is_light():
    heavy = ["arviz", "xarray", "tensorflow_probability", "blackjax", "zarr", "matplotlib", "pandas"]
    program = f"import sys, ppleffects; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

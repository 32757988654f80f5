"""Checkpoints: the same bits whatever ends a run, ragged chains, refusals, and what is there stays intact.

The oracle is the same run without a checkpoint, which nothing interrupts.
"""

import contextlib
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.effects.structure import described
from ppleffects.errors import CheckpointError, DiagnosticsWarning, LayoutWarning
from ppleffects.inference import checkpoint as checkpoint_module
from ppleffects.inference import state_file
from ppleffects.inference.archive import StoredSeries, open_arrays, open_tree
from ppleffects.inference.identity import checksum
from ppleffects.inference.progress import Progress
from tests.conftest import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning")

Y = np.random.default_rng(0).normal(1.0, 1.0, size=8)
KERNELS = {"own": ppl.NUTS(), "numpyro": ppl.NUTS(engine="numpyro")}
SHORT = {
    "num_warmup": 40,
    "num_samples": 60,
    "num_chains": 3,
    "progress": False,
    "chunk_size": 7,
    "groups": ("warmup",),
}


def model(y):
    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
    ppl.sample("rates", dist.Gamma(3.0, jnp.arange(1.0, 4.0)), dims=("kind",))
    ppl.observe("y", dist.Normal(mu, 1.0), y)


def sharded(y):
    """As ``model``, its likelihood on the shards of `data`, with a latent there too."""
    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))

    def body(mu, y):
        local = ppl.sample("local", dist.Normal(jnp.zeros_like(y), 1.0), dims=("row",))
        ppl.observe("y", dist.Normal(mu + local, 1.0), y)

    jax.shard_map(body, in_specs=(P(), P("data")), out_specs=P())(mu, y)


@pytest.fixture(autouse=True)
def _written_after_each_call(monkeypatch):
    monkeypatch.setattr(checkpoint_module, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint_module, "MAX_SHARE", 1e9)


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard():
    """Also where the tests run in the background of a shell, which lets programs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole():
    """A run that nothing interrupts, for each kernel."""
    return {name: ppl.mcmc(model, kernel, **SHORT)(0, Y) for name, kernel in KERNELS.items()}


def assert_same(tree, expected):
    assert list(tree.children) == list(expected.children)
    for group in expected.children:
        xarray.testing.assert_equal(tree[group].to_dataset(), expected[group].to_dataset())


class Crash(Exception):
    pass


def ended(monkeypatch, phase, number, what):
    """Does ``what`` after a call of the phase that has this number."""
    seen = []

    def update(self, name, done, **_):
        seen.append(name)
        if seen.count(phase) == number and name == phase:
            what()

    monkeypatch.setattr(Progress, "update", update)


def crash():
    raise Crash


def begun(tmp_path, monkeypatch, *, phase="sampling", number=3, kernel=KERNELS["own"], run=model, key=0, **changes):
    """The path of a run that crashed."""
    path = tmp_path / "run.zarr"
    with monkeypatch.context() as patch:
        ended(patch, phase, number, crash)
        with pytest.raises(Crash):
            ppl.mcmc(run, kernel, **(SHORT | changes), checkpoint=path)(key, Y)
    return path


def test_the_result_is_that_of_a_run_in_memory(tmp_path, whole):
    tree = ppl.mcmc(model, **SHORT, checkpoint=tmp_path / "new" / "run.zarr")(0, Y)
    assert_same(tree, whole["own"])
    for group in tree.children:
        for name, array in whole["own"][group].variables.items():
            assert (tree[group][name].dims, tree[group][name].dtype) == (array.dims, array.dtype), name
    times = {"compile_time", "warmup_time", "sampling_time"}
    assert {k: v for k, v in tree.attrs.items() if k not in times} == {
        k: v for k, v in whole["own"].attrs.items() if k not in times
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("phase", "number"), [("warm-up", 2), ("sampling", 1), ("sampling", 4)])
def test_resumption_gives_the_same_bits(tmp_path, monkeypatch, whole, kernel, phase, number):
    path = begun(tmp_path, monkeypatch, phase=phase, number=number, kernel=KERNELS[kernel])
    assert_same(ppl.mcmc(model, KERNELS[kernel], **SHORT, checkpoint=path)(0, Y), whole[kernel])


def test_another_chunk_size_resumes(tmp_path, monkeypatch, whole):
    path = begun(tmp_path, monkeypatch)
    assert_same(ppl.mcmc(model, **(SHORT | {"chunk_size": None}), checkpoint=path)(0, Y), whole["own"])


def test_a_crash_before_the_first_commit_begins_anew(tmp_path, monkeypatch, whole):
    path = begun(tmp_path, monkeypatch, phase="warm-up", number=1)
    assert_same(ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y), whole["own"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_samples_extend_a_finished_run(tmp_path, whole, kernel):
    path = tmp_path / "run.zarr"
    for num_samples in (10, 25, 60, 60):
        tree = ppl.mcmc(model, KERNELS[kernel], **(SHORT | {"num_samples": num_samples}), checkpoint=path)(0, Y)
        assert tree.posterior.sizes["draw"] == num_samples
    assert_same(tree, whole[kernel])


def test_thinning_and_keep_extend(tmp_path):
    settings = SHORT | {"thinning": 3, "keep": ("mu",), "groups": ("log_likelihood",)}
    expected = ppl.mcmc(model, **settings)(0, Y)
    path = tmp_path / "run.zarr"
    ppl.mcmc(model, **(settings | {"num_samples": 20}), checkpoint=path)(0, Y)
    assert_same(ppl.mcmc(model, **settings, checkpoint=path)(0, Y), expected)


def test_nothing_of_the_posterior_is_kept(tmp_path):
    settings = SHORT | {"keep": ()}
    assert_same(ppl.mcmc(model, **settings, checkpoint=tmp_path / "a")(0, Y), ppl.mcmc(model, **settings)(0, Y))


def test_a_finished_run_is_read_and_compiles_nothing(tmp_path, monkeypatch, whole):
    path = tmp_path / "run.zarr"
    ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y)
    monkeypatch.setattr("ppleffects.inference.run.begin_chains", crash)
    monkeypatch.setattr("ppleffects.inference.run.advance_chains", crash)
    assert_same(ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y), whole["own"])


def test_readers_see_whole_draws_while_it_goes_on(tmp_path, monkeypatch, whole):
    path, lengths = tmp_path / "run.zarr", []

    def look():
        tree = xarray.open_datatree(path, engine="zarr")
        count = tree["posterior"].sizes["draw"]
        lengths.append(count)
        expected = whole["own"]["posterior"].isel(draw=slice(count)).to_dataset()
        xarray.testing.assert_equal(tree["posterior"].to_dataset(), expected)
        assert tree.attrs["complete"] is False

    for number in (2, 5):
        with monkeypatch.context() as patch:
            ended(patch, "sampling", number, lambda: (look(), crash()))
            with contextlib.suppress(Crash):
                ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y)
    assert 0 < lengths[0] < lengths[1] < 60


# --- Ctrl-C and kill -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("phase", ["warm-up", "sampling"])
def test_ctrl_c_keeps_all_draws(tmp_path, monkeypatch, whole, kernel, phase):
    path = tmp_path / "run.zarr"
    with monkeypatch.context() as patch:
        ended(patch, phase, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.warns(DiagnosticsWarning, match="interrupted; the draws so far are returned"):
            tree = ppl.mcmc(model, KERNELS[kernel], **SHORT, checkpoint=path)(0, Y)
    assert tree.attrs["complete"] is False
    group = "posterior" if phase == "sampling" else "warmup_posterior"
    count = tree[group].sizes["draw"]
    assert 0 < count < 60
    xarray.testing.assert_equal(tree[group].to_dataset(), whole[kernel][group].isel(draw=slice(count)).to_dataset())
    assert_same(ppl.mcmc(model, KERNELS[kernel], **SHORT, checkpoint=path)(0, Y), whole[kernel])


def test_ctrl_c_before_any_draw_goes_on_up_and_resumes(tmp_path, monkeypatch, whole):
    path, settings = tmp_path / "run.zarr", SHORT | {"groups": ()}
    with monkeypatch.context() as patch:
        ended(patch, "warm-up", 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            ppl.mcmc(model, **settings, checkpoint=path)(0, Y)
    tree = ppl.mcmc(model, **settings, checkpoint=path)(0, Y)
    xarray.testing.assert_equal(tree["posterior"].to_dataset(), whole["own"]["posterior"].to_dataset())


def test_a_second_ctrl_c_ends_at_once(tmp_path, monkeypatch, whole):
    path = tmp_path / "run.zarr"

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        ended(patch, "sampling", 3, twice)
        tree = ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y)
    count = tree.posterior.sizes["draw"]
    expected = whole["own"]["posterior"].isel(draw=slice(count)).to_dataset()
    xarray.testing.assert_equal(tree["posterior"].to_dataset(), expected)
    assert_same(ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y), whole["own"])


KILLED = """
import sys
import numpy as np
import ppleffects as ppl
from ppleffects.inference import checkpoint
from tests.inference.test_checkpoint import SHORT, Y, model

checkpoint.MIN_SECONDS, checkpoint.MAX_SHARE = 0.0, 1e9
ppl.mcmc(model, **SHORT, checkpoint=sys.argv[1])(0, Y)
"""


def killed(path, seconds):
    """Runs it in another process and kills that so many seconds after the checkpoint is there; whether it was alive."""
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", KILLED, str(path)], cwd=ROOT)
    while process.poll() is None and not path.exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.002)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.kill()
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("seconds", [0.0, 0.15])
def test_kill(tmp_path, whole, seconds):
    path = tmp_path / "run.zarr"
    killed(path, seconds)
    assert_same(ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y), whole["own"])


@pytest.mark.validate
def test_kill_at_random_moments(tmp_path, whole):
    rng, alive = np.random.default_rng(0), 0
    for number in range(20):
        path = tmp_path / f"{number}.zarr"
        alive += killed(path, rng.uniform(0.0, 1.0))
        assert_same(ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y), whole["own"])
    assert alive >= 10


# --- what is refused ------------------------------------------------------------------------------------------------


def other_scale(y):
    mu = ppl.sample("mu", dist.Normal(0.0, 2.0))
    ppl.sample("rates", dist.Gamma(3.0, jnp.arange(1.0, 4.0)), dims=("kind",))
    ppl.observe("y", dist.Normal(mu, 1.0), y)


def other_site(y):
    mu = ppl.sample("nu", dist.Normal(0.0, 1.0))
    ppl.sample("rates", dist.Gamma(3.0, jnp.arange(1.0, 4.0)), dims=("kind",))
    ppl.observe("y", dist.Normal(mu, 1.0), y)


DIFFERENT = {
    "the model": ({"run": other_scale}, r"differs in: equations of the model\n.*Normal[^\n]*1\.0[^\n]*\n.*2\.0"),
    "a site": ({"run": other_site}, "differs in: site mu"),
    "data": ({"y": Y + 1e-9}, "differs in: data y"),
    "fewer data": ({"y": Y[:4]}, "differs in: site y"),
    "the key": ({"key": 1}, "differs in: key"),
    "the kernel": ({"kernel": ppl.NUTS(target_accept=0.9)}, "differs in: kernel target_accept"),
    "the engine": ({"kernel": KERNELS["numpyro"]}, "differs in: kernel engine"),
    "the sampler": ({"kernel": ppl.HMC()}, "differs in: kernel name"),
    "chains": ({"num_chains": 4}, "differs in: num_chains"),
    "warm-up": ({"num_warmup": 50}, "differs in: num_warmup"),
    "thinning": ({"thinning": 2}, "differs in: thinning"),
    "groups": ({"groups": ()}, "differs in: groups"),
    "keep": ({"keep": ("mu",)}, "differs in: keep"),
    "init": ({"init": {"mu": 0.5}}, "differs in: init"),
    "fewer samples": ({"num_samples": 30}, "asked for more draws than are asked for now"),
}


def files(path):
    return {x: x.read_bytes() for x in sorted(path.rglob("*")) if x.is_file()}


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    path = tmp_path_factory.mktemp("there") / "run.zarr"
    ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y)
    return path


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_run_is_refused(there, name):
    changes, message = DIFFERENT[name]
    changes = {"run": model, "y": Y, "key": 0, "kernel": KERNELS["own"]} | changes
    run, y, key, kernel = (changes.pop(x) for x in ("run", "y", "key", "kernel"))
    before = files(there)
    with pytest.raises(CheckpointError, match=message):
        ppl.mcmc(run, kernel, **(SHORT | changes), checkpoint=there)(key, y)
    assert files(there) == before


def test_a_changed_line_number_is_no_difference(there):
    source = "\n\n\n" + "\n".join(
        [
            "def model(y):",
            "    # the same model elsewhere",
            '    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))',
            '    ppl.sample("rates", dist.Gamma(3.0, jnp.arange(1.0, 4.0)), dims=("kind",))',
            '    ppl.observe("y", dist.Normal(mu, 1.0), y)',
        ]
    )
    scope = {"ppl": ppl, "dist": dist, "jnp": jnp}
    exec(compile(source, "elsewhere.py", "exec"), scope)
    ppl.mcmc(scope["model"], **SHORT, checkpoint=there)(0, Y)


def damaged_root(path):
    text = (path / "zarr.json").read_text()
    (path / "zarr.json").write_text(text[: len(text) // 2])


def damaged_state(path):
    (state,) = (path / "sampler").glob("*.npz")
    state.write_bytes(state.read_bytes()[:-2000])


def pickled_state(path):
    (state,) = (path / "sampler").glob("*.npz")
    bomb = np.empty(3, object)
    bomb[:] = [_Bomb()] * 3
    with zipfile.ZipFile(state) as file:
        names = file.namelist()
    with zipfile.ZipFile(state, "w") as file:
        for name in names:
            with file.open(name, "w") as member:
                np.lib.format.write_array(member, bomb, allow_pickle=True)


def huge_state(path):
    """Arrays that say they are of a tebibyte."""
    (state,) = (path / "sampler").glob("*.npz")
    with zipfile.ZipFile(state) as file:
        names = file.namelist()
    with zipfile.ZipFile(state, "w") as file:
        for name in names:
            with file.open(name, "w") as member:
                header = {"descr": "<f8", "fortran_order": False, "shape": (2**37,)}
                np.lib.format.write_array_header_1_0(member, header)
                member.write(b"\0" * 100)


def no_state(path):
    (state,) = (path / "sampler").glob("*.npz")
    state.unlink()


def later_format(path):
    document = json.loads((path / "zarr.json").read_text())
    name = checkpoint_module.ATTRIBUTE
    document["attributes"][name] = json.dumps(json.loads(document["attributes"][name]) | {"format": 99})
    (path / "zarr.json").write_text(json.dumps(document))


def changed_attribute(name, value):
    def damage(path):
        document = json.loads((path / "zarr.json").read_text())
        attribute = checkpoint_module.ATTRIBUTE
        saved = json.loads(document["attributes"][attribute])
        document["attributes"][attribute] = json.dumps(saved | {name: value})
        (path / "zarr.json").write_text(json.dumps(document))

    return damage


ATTACKED = Path(tempfile.gettempdir()) / "ppleffects-was-attacked"


class _Bomb:
    def __reduce__(self):
        return Path.touch, (ATTACKED,)


DAMAGES = {
    "truncated metadata": (damaged_root, "holds no checkpoint, or a damaged one"),
    "truncated state": (damaged_state, "sampler's state in the checkpoint is damaged"),
    "state with code in it": (pickled_state, "sampler's state in the checkpoint is damaged"),
    "state of no end": (huge_state, "sampler's state in the checkpoint is damaged"),
    "no state": (no_state, "sampler's state in the checkpoint is damaged"),
    "a later format": (later_format, "format 99, where this version reads 1"),
    "a path for a number": (
        changed_attribute("commit", "../../../thesis"),
        "counts of transitions or draws that no run",
    ),
    "other attributes": (changed_attribute("phases", {"sampling": {"append": [1]}}), "counts of transitions or draws"),
    "too few chains": (changed_attribute("rows", {"posterior": [3]}), "counts of transitions or draws"),
    "no counts": (changed_attribute("rows", 5), "holds no checkpoint, or a damaged one"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused(tmp_path, monkeypatch, name):
    path = begun(tmp_path, monkeypatch)
    damage, message = DAMAGES[name]
    damage(path)
    before = {x: y for x, y in files(path).items() if x.name != "lock"}
    with pytest.raises(CheckpointError, match=message):
        ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y)
    assert {x: y for x, y in files(path).items() if x.name != "lock"} == before
    assert not ATTACKED.exists()


def test_an_attack_would_work_on_a_loader_that_unpickles(tmp_path):
    with pytest.raises(FileNotFoundError, match="was-attacked-not"):
        pickle.loads(pickle.dumps(_Missing()))


class _Missing:
    def __reduce__(self):
        return os.stat, ("/was-attacked-not",)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_checkpoint_is_left_alone(tmp_path, kind):
    path = tmp_path / "results"
    if kind == "folder":
        path.mkdir()
        (path / "thesis.tex").write_text("years of work")
    else:
        path.write_text("years of work")
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y)
    assert files(tmp_path) == before


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        ppl.mcmc(model, **SHORT, checkpoint=tmp_path / "file" / "run.zarr")(0, Y)


def test_an_empty_folder_is_used(tmp_path, whole):
    assert_same(ppl.mcmc(model, **SHORT, checkpoint=tmp_path)(0, Y), whole["own"])


def test_a_full_disk(tmp_path, monkeypatch, whole):
    """Files may grow to some bytes: the system then fails as it does on a full disk."""
    path = begun(tmp_path, monkeypatch)
    before = {x: y for x, y in files(path).items() if x.name != "lock"}
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with monkeypatch.context() as patch:
            ended(patch, "sampling", 1, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1])))
            with pytest.raises(CheckpointError, match="cannot be written"):
                ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert before[path / "zarr.json"] == (path / "zarr.json").read_bytes()
    assert_same(ppl.mcmc(model, **SHORT, checkpoint=path)(0, Y), whole["own"])


def test_one_run_at_a_time(tmp_path, monkeypatch, whole):
    path, settings = begun(tmp_path, monkeypatch), SHORT

    def another():
        with pytest.raises(CheckpointError, match="another process writes"):
            ppl.mcmc(model, **settings, checkpoint=path)(0, Y)

    with monkeypatch.context() as patch:
        ended(patch, "sampling", 2, another)
        tree = ppl.mcmc(model, **settings, checkpoint=path)(0, Y)
    assert_same(tree, whole["own"])


# --- layouts --------------------------------------------------------------------------------------------------------


def test_a_sharded_run_resumes_to_the_same_bits(tmp_path, monkeypatch, mesh_2x2):
    settings = SHORT | {"mesh": mesh_2x2}
    expected = ppl.mcmc(sharded, **settings)(0, Y)
    path = begun(tmp_path, monkeypatch, run=sharded, **settings)
    tree = ppl.mcmc(sharded, **settings, checkpoint=path)(0, Y)
    assert_same(tree, expected)


def test_another_layout_goes_on_in_law(tmp_path, monkeypatch, mesh_2x2):
    """Saved draws stay to the last bit, and the next transitions agree to rounding."""
    settings = SHORT | {"mesh": mesh_2x2}
    expected = ppl.mcmc(sharded, **settings)(0, Y)
    path = begun(tmp_path, monkeypatch, run=sharded, **settings)
    count = open_tree(path)["posterior"].sizes["draw"]
    mesh = jax.make_mesh((4,), ("data",), axis_types=mesh_2x2.axis_types[:1])
    with pytest.warns(LayoutWarning, match="goes on elsewhere"):
        tree = ppl.mcmc(sharded, **(SHORT | {"mesh": mesh}), checkpoint=path)(0, Y)
    for name in ("mu", "local"):
        array, before = tree.posterior[name].values, expected.posterior[name].values
        np.testing.assert_array_equal(array[:, :count], before[:, :count])
        np.testing.assert_allclose(array[:, count : count + 3], before[:, count : count + 3], rtol=1e-7)


def test_another_density_is_seen_on_another_layout(tmp_path, monkeypatch, mesh_2x2):
    path = begun(tmp_path, monkeypatch, run=sharded, mesh=mesh_2x2)

    def changed(y):
        sharded(y)
        ppl.factor("more", jnp.sum(y))

    mesh = jax.make_mesh((4,), ("data",), axis_types=mesh_2x2.axis_types[:1])
    with pytest.raises(CheckpointError, match="the density differs|differs in: site more"):
        ppl.mcmc(changed, **(SHORT | {"mesh": mesh}), checkpoint=path)(0, Y)


def test_latents_of_padded_rows_need_as_many_shards(tmp_path, monkeypatch):
    """Five rows: six on two shards, eight on four."""

    def padded(data, mask):
        def body(data, mask):
            local = ppl.sample("local", dist.Normal(jnp.zeros_like(data), 1.0), dims=("row",))
            ppl.observe("y", dist.Normal(local, 1.0), data, mask=mask)

        jax.shard_map(body, in_specs=(P("data"), P("data")), out_specs=P())(data, mask)

    def rows(size):
        mesh = jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,))
        return mesh, ppl.shard_rows(Y[:5], mesh)

    path, settings = tmp_path / "run.zarr", SHORT | {"num_chains": 1}
    mesh, arguments = rows(2)
    with monkeypatch.context() as patch:
        ended(patch, "sampling", 2, crash)
        with pytest.raises(Crash):
            ppl.mcmc(padded, **settings, mesh=mesh, checkpoint=path)(0, *arguments)
    wide, others = rows(4)
    with pytest.raises(CheckpointError, match=r"another length.*\n.*\[6\].*\n.*\[8\]"):
        ppl.mcmc(padded, **settings, mesh=wide, checkpoint=path)(0, *others)
    tree = ppl.mcmc(padded, **settings, mesh=mesh, checkpoint=path)(0, *arguments)
    assert_same(tree, ppl.mcmc(padded, **settings, mesh=mesh)(0, *arguments))
    assert tree.posterior["local"].shape == (1, 60, 5)


# --- the parts ------------------------------------------------------------------------------------------------------


def test_chains_of_any_pace_are_written_in_full(tmp_path, monkeypatch):
    """Random appends and flushes, with files of 5 rows, against plain lists."""
    monkeypatch.setattr("ppleffects.inference.archive.CHUNK_BYTES", 5 * 3 * 2 * 8)
    from ppleffects.inference.archive import create
    from ppleffects.inference.datatree import to_datatree

    rng, path, total = np.random.default_rng(1), tmp_path / "store", 47
    empty = {"x": np.zeros((3, 0, 2)), "ok": np.zeros((3, 0), bool)}
    create(path, to_datatree({"posterior": empty}, {}))
    expected = [np.zeros((0, 2)) for _ in range(3)]
    series = StoredSeries(open_arrays(path, "posterior", total), path / "posterior", np.zeros(3, int))
    while series.length < total:
        for chain in range(3):
            count = min(int(rng.integers(0, 9)) * int(rng.random() < 0.6 + 0.2 * chain), total - len(expected[chain]))
            rows = rng.normal(size=(count, 2))
            series.append(chain, {"x": rows, "ok": rows[:, 0] > 0})
            expected[chain] = np.concatenate([expected[chain], rows])
        if rng.random() < 0.5:
            series.flush()
            for chain in range(3):
                stored = np.asarray(open_arrays(path, "posterior", total)["x"][chain, : len(expected[chain])])
                np.testing.assert_array_equal(stored, expected[chain])
        if rng.random() < 0.3:
            series.flush()
            lengths = series.lengths.copy()
            series = StoredSeries(open_arrays(path, "posterior", total), path / "posterior", lengths)
    series.flush()
    arrays = series.arrays()
    np.testing.assert_array_equal(arrays["x"], np.stack(expected))
    np.testing.assert_array_equal(arrays["ok"], np.stack(expected)[..., 0] > 0)


def test_blocks_that_are_written_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("ppleffects.inference.archive.CHUNK_BYTES", 5 * 8)
    from ppleffects.inference.archive import GrowingArray, create
    from ppleffects.inference.datatree import to_datatree

    create(tmp_path / "store", to_datatree({"posterior": {"x": np.zeros((1, 0))}}, {}))
    array = open_arrays(tmp_path / "store", "posterior", 1000)["x"]
    growing = GrowingArray(array, tmp_path, np.zeros(1, int))
    for start in range(0, 1000, 10):
        growing.write(0, start, np.arange(10.0))
        growing.flush(start + 10)
        assert not growing._blocks


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int32, bool, np.complex128, jnp.bfloat16])
def test_the_checksum_does_not_depend_on_the_layout(mesh_2x2, dtype):
    array = np.random.default_rng(0).normal(size=(8, 4, 3)) * 10
    array = array > 0 if dtype is bool else array.astype(dtype)
    own = checksum(array)
    first, second = mesh_2x2.axis_names
    for spec in (P(), P(first), P(first, second), P(second, first), P((first, second))):
        assert checksum(jax.device_put(array, NamedSharding(mesh_2x2, spec))) == own
    for change in (array[::-1], array[:, ::-1], array[:4]):
        assert checksum(change) != own
    changed = array.copy()
    changed[7, 3, 2] = array[7, 3, 2] == 0
    assert checksum(changed) != own


def test_one_bit_changes_the_checksum():
    array = np.zeros((1000, 100), np.float32)
    own = checksum(array)
    array.view(np.uint32)[999, 99] = 1
    assert checksum(array) != own


WORDS = """
import jax, jax.numpy as jnp, numpy as np, ppleffects as ppl
from tests.inference.test_checkpoint import Y, sharded, model
from ppleffects.effects.structure import described
mesh = jax.make_mesh((2, 2), ("chains", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
with jax.set_mesh(mesh):
    print("\\n".join(described(ppl.target(sharded)(Y).program.jaxpr) + described(ppl.target(model)(Y).program.jaxpr)))
"""


def test_a_program_is_told_alike_in_every_process():
    def words(seed):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", WORDS], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    first, second = words("1"), words("2")
    assert first == second
    assert "Gamma" in first
    assert "shard_map" in first
    assert "0x" not in first


def test_a_program_is_told_by_what_it_computes():
    def told(scale):
        return described(ppl.target(lambda: ppl.sample("x", dist.Normal(0.0, scale)))().program.jaxpr)

    assert told(1.0) == told(1.0)
    assert told(1.0) != told(2.0)
    assert not any(re.search(r"test_checkpoint\.py", line) for line in told(1.0))


def test_a_state_of_another_shape_is_refused(tmp_path):
    state_file.write(tmp_path / "1.npz", {"a": np.zeros(3)})
    with pytest.raises(CheckpointError, match="takes 152 bytes|float64\\[3\\] where float64\\[4\\]"):
        state_file.read(tmp_path / "1.npz", {"a": jax.ShapeDtypeStruct((4,), np.float64)}, None, 1)

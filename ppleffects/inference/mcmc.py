"""The driver of Markov chain Monte Carlo: a model, a kernel and a mesh in, an ArviZ DataTree out."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from rich.console import Console

from ppleffects.errors import DiagnosticsWarning
from ppleffects.inference.checkpoint import opened
from ppleffects.inference.datatree import check_coords, constant_data, to_datatree
from ppleffects.inference.kernel import Kernel
from ppleffects.inference.layout import trace
from ppleffects.inference.nuts import NUTS
from ppleffects.inference.options import Options
from ppleffects.inference.processes import fetch, is_first
from ppleffects.inference.report import Report
from ppleffects.inference.rows import lay_out, restore, restore_arguments, restored_sites, row_axes
from ppleffects.inference.run import Run
from ppleffects.inference.target import target as make_target
from ppleffects.interpretations.draw import as_key
from ppleffects.interpretations.program import bind_arguments

if TYPE_CHECKING:
    import xarray

DEFAULT_KERNEL = NUTS()


def mcmc(
    model: Callable,
    kernel: Kernel = DEFAULT_KERNEL,
    *,
    num_warmup: int = 1000,
    num_samples: int = 1000,
    num_chains: int = 4,
    mesh: Mesh | None = None,
    chain_axis: str = "chains",
    thinning: int = 1,
    init: str | Mapping[str, Any] | None = None,
    keep: Sequence[str] | None = None,
    groups: Sequence[str] = (),
    progress: bool = True,
    chunk_size: int | None = None,
    checkpoint: Any = None,
    coords: Mapping[str, Any] | None = None,
) -> Callable[..., xarray.DataTree]:
    """A function ``(key, *args, **kwargs) -> DataTree`` that samples the model's posterior.

    Chains are sharded over the axis ``chain_axis`` of the mesh where it has one, and vmapped within each shard; any
    number of chains runs on any mesh. Data stay where they are: only the density sees their axes. A chain depends on
    the key and its own number alone, not on the mesh, the other chains, ``chunk_size`` or ``progress``.

    Args:
        model: a function that calls ``ppl.sample`` and ``ppl.observe``.
        kernel: the sampler, ``ppl.NUTS(...)`` or ``ppl.HMC(...)``.
        num_warmup: at most so many transitions per chain adapt the kernel; they are not among the draws.
        num_samples: transitions per chain after warm-up.
        num_chains: number of chains.
        mesh: devices to run on; else those of ``jax.set_mesh``, of the model's ``shard_map`` or data, or by a rule.
        chain_axis: the mesh axis of chains.
        thinning: every so-many-th draw is kept, so that ``num_samples // thinning`` remain per chain.
        init: where chains start: "uniform" (by default: each unconstrained coordinate in (-2, 2)), "prior", "mode", or
            a dict from latents to one of these or to constrained values, for all chains or for each on a leading axis,
            as a draw of a former run: ``tree["posterior"].isel(draw=-1)``. Starts that are not finite are drawn again.
        keep: names of latents and deterministics to return; all by default.
        groups: further groups: "warmup" (``warmup_posterior``, ``warmup_sample_stats``), "log_likelihood" (pointwise).
        progress: whether to show a progress bar and, at the end, the diagnostics.
        chunk_size: transitions per call of the compiled program; by default calls take about half a second. Memory on
            the devices grows with it, not with ``num_samples``.
        checkpoint: a folder that keeps the run: its draws, as a zarr store that xarray can open while the run goes on,
            and the sampler's state. The same call goes on from there, with the draws of a run that was never
            interrupted; with more ``num_samples`` it goes on to as many. The result reads its arrays from there.
        coords: values along named dimensions, by dimension.

    Returns:
        A function of a key (a typed key, a ``uint32`` key or an int seed) and the model's arguments. Its DataTree has
        the groups ``posterior``, ``sample_stats``, ``observed_data``, ``constant_data`` (array arguments that are not
        observed) and what ``groups`` asks for. Its attributes tell library, kernel, seed, layout, timings, diagnostics,
        and whether the run is complete: Ctrl-C ends it early and returns the draws so far.

    Raises:
        SettingsError, ValuesError: a setting is out of its range, of another kind, or names nothing.
        DiscreteLatentError: a latent site is discrete.
        MeshError: the model names a mesh of other axes than the run's.
        NoValidStartError: no start with a finite density and gradient was found.
        CheckpointError: the checkpoint cannot be written, or belongs to another run; the message names the difference.

    Warns:
        DiagnosticsWarning: the diagnostics say that the draws should not be trusted.
    """
    given = Options(num_warmup, num_samples, num_chains, thinning, keep, groups, chunk_size, init, checkpoint)
    return _Sampling(model, kernel, given.checked(kernel, mesh), mesh, chain_axis, coords, progress)


@dataclass(frozen=True)
class _Sampling:
    """What ``mcmc`` returns; its fields are as ``mcmc`` documents them."""

    model: Callable
    kernel: Kernel
    options: Options
    mesh: Mesh | None
    chain_axis: str
    coords: Mapping[str, Any] | None
    progress: bool

    def __call__(self, key: Any, /, *args: Any, **kwargs: Any) -> xarray.DataTree:
        """The draws of a run with this key, of the model with these arguments."""
        typed_key, options, kernel = as_key(key), self.options, self.kernel
        target, layout = trace(
            lambda: make_target(self.model)(*args, **kwargs), self.mesh, self.chain_axis, options.num_chains
        )
        kernel.check(target)
        axes = row_axes(target.model, target.sites)
        sites = restored_sites(target.sites, axes)
        check_coords(sites, self.coords)
        arguments, shown = bind_arguments(self.model, args, kwargs), self.progress and is_first()
        own = dataclasses.replace(options, init=lay_out(options.init, target.sites, axes))
        about = {**_library(), **_seed(key, typed_key)}
        with (
            layout.context(),
            opened(options.checkpoint, target, sites, layout, typed_key, kernel, options, arguments) as store,
        ):
            run = Run(kernel, own, layout, target, axes, progress=shown, checkpoint=store, about=about)
            observed = {name: np.asarray(fetch(value)) for name, value in run.target.observed().items()}
            observed = restore(observed, axes)
            data = {"observed_data": observed, "constant_data": constant_data(restore_arguments(arguments), observed)}

            def tree(groups: Mapping[str, Any], attrs: dict[str, Any]) -> xarray.DataTree:
                return to_datatree({**groups, **data}, sites, coords=self.coords, attrs=attrs)

            with run.bar:
                run.start(typed_key, arguments)
                run.advance(lambda groups: tree(groups, run.attrs()))
            report = run.report()
            _tell(report, str(run.layout), complete=run.complete, progress=shown)
            return run.result(tree, report.attrs())


def _seed(given: Any, key: Array) -> dict[str, Any]:
    data = {
        "key_data": np.asarray(jax.random.key_data(key)).astype(int).tolist(),
        "key_impl": str(jax.random.key_impl(key)),
    }
    return {"seed": int(given), **data} if isinstance(given, int | np.integer) else data


def _library() -> dict[str, str]:
    try:
        version = metadata.version("ppleffects")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        version = "unknown"
    return {"inference_library": "ppleffects", "inference_library_version": version}


def _tell(report: Report, layout: str, *, complete: bool, progress: bool) -> None:
    text = report.text() if complete else f"interrupted; the draws so far are returned\n{report.text()}"
    if progress:
        text = f"{text}\n{layout}"
    if report.problems or not complete:
        warnings.warn(f"mcmc: {text}", DiagnosticsWarning, stacklevel=3)
    elif progress:
        Console(stderr=True).print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

"""What a caller of ``mcmc`` may ask for, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ppleffects.errors import SettingsError
from ppleffects.inference.chunks import Plan, draw_shapes
from ppleffects.inference.settings import check_numbers
from ppleffects.language.arguments import as_names

GROUPS = ("warmup", "log_likelihood")
# Draws that wait on the devices for the end of a chunk take at most so many bytes, in all.
MAX_BUFFER_BYTES = 64 * 2**20
MAX_BUFFER_ROWS = 500


@dataclass(frozen=True)
class Options:
    """The settings of a run, as ``mcmc`` documents them."""

    num_warmup: int
    num_samples: int
    num_chains: int
    thinning: int
    keep: Sequence[str] | None
    groups: Sequence[str]
    chunk_size: int | None
    init: Mapping[str, Any] | str | None
    checkpoint: Any

    def checked(self, kernel: Any, mesh: Any) -> Options:
        """These settings, if they make sense by themselves and with a kernel and a mesh.

        Raises:
            SettingsError: a number is out of its range, a group is unknown, or the kernel, mesh or path is none.
            ValuesError: ``keep`` or ``groups`` are no names.
        """
        _check_objects(kernel, mesh)
        check_numbers(self)
        keep, groups = None if self.keep is None else as_names(self.keep, "keep="), as_names(self.groups, "groups=")
        if self.num_samples < self.thinning:
            raise SettingsError(
                "thinning leaves no draw",
                expected="thinning <= num_samples",
                found=f"thinning={self.thinning}, num_samples={self.num_samples}",
                fix="ask for more samples: num_samples // thinning are kept",
            )
        unknown = [group for group in groups if group not in GROUPS]
        if unknown:
            raise SettingsError(
                "groups= names an unknown group",
                expected=f"among {GROUPS}",
                found=f"{unknown}",
                fix='give a sequence of names, as in groups=("warmup",)',
            )
        if not isinstance(self.checkpoint, str | os.PathLike | None):
            raise SettingsError(
                "checkpoint= is no path",
                expected="a path to a folder, as a str or a pathlib.Path, or None",
                found=f"{self.checkpoint!r}",
                fix='checkpoint="run.zarr"',
            )
        return dataclasses.replace(self, keep=keep, groups=groups)

    def plan(self, target: Any) -> Plan:
        """What the chunk program is compiled for.

        Raises:
            SettingsError: ``keep`` names a site that is no latent and no deterministic.
        """
        available = tuple(name for name, site in target.sites.items() if site.kind in ("sample", "deterministic"))
        keep = available if self.keep is None else tuple(self.keep)
        unknown = [name for name in keep if name not in available]
        if unknown:
            raise SettingsError(
                "keep= names an unknown site",
                expected=f"among {sorted(available)}",
                found=f"{unknown}",
                fix="give a sequence of names of latents and deterministics",
            )
        observed = tuple(name for name, site in target.sites.items() if site.kind == "observe")
        pointwise = observed if "log_likelihood" in self.groups else ()
        rows = 1
        if self.chunk_size is not None:
            rows = -(-self.chunk_size // self.thinning)
        else:
            shapes = jax.tree.leaves(draw_shapes(target, Plan(self.thinning, self.thinning, keep, pointwise)))
            row_bytes = self.num_chains * sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
            rows = int(np.clip(MAX_BUFFER_BYTES // max(row_bytes, 1), 1, MAX_BUFFER_ROWS))
        return Plan(rows * self.thinning, self.thinning, keep, pointwise)


def _check_objects(kernel: Any, mesh: Any) -> None:
    members = ("state_axes", "settings", "check", "init", "step")
    if isinstance(kernel, type) or not all(hasattr(kernel, member) for member in members):
        raise SettingsError(
            "the kernel is no sampler",
            expected="ppl.NUTS(...) or ppl.HMC(...)",
            found=f"{kernel!r}",
            fix="ppl.mcmc(model, ppl.NUTS()): the model first, then the kernel",
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise SettingsError(
            "mesh= is no mesh",
            expected="jax.make_mesh(...), or None",
            found=f"{mesh!r}",
            fix='mesh=jax.make_mesh((2, 2), ("chains", "data"))',
        )

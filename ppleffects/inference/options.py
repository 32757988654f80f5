"""What a caller of ``mcmc`` may ask for, checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ppleffects.errors import NotAvailableError, SettingsError, ShapeError, ValuesError
from ppleffects.inference.chunks import Plan, draw_shapes

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
    keep: tuple[str, ...] | None
    groups: tuple[str, ...]
    chunk_size: int | None
    init: Mapping[str, Any] | None
    checkpoint: Any

    def __post_init__(self):
        """Raise where a setting makes no sense by itself.

        Raises:
            SettingsError: a number is out of its range, or a group is unknown.
            NotAvailableError: ``checkpoint`` is given.
        """
        floors = {"num_warmup": 0, "num_samples": 1, "num_chains": 1, "thinning": 1, "chunk_size": 1}
        for name, floor in floors.items():
            value = getattr(self, name)
            if name == "chunk_size" and value is None:
                continue
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < floor:
                raise SettingsError(
                    f"{name} is out of its range",
                    expected=f"an int >= {floor}",
                    found=f"{value!r}",
                    fix="give a number in this range, or leave it out",
                )
        if self.num_samples < self.thinning:
            raise SettingsError(
                "thinning leaves no draw",
                expected="thinning <= num_samples",
                found=f"thinning={self.thinning}, num_samples={self.num_samples}",
                fix="ask for more samples: num_samples // thinning are kept",
            )
        unknown = [group for group in self.groups if group not in GROUPS]
        if unknown:
            raise SettingsError(
                "groups= names an unknown group",
                expected=f"among {GROUPS}",
                found=f"{unknown}",
                fix='give a sequence of names, as in groups=("warmup",)',
            )
        if self.checkpoint is not None:
            raise NotAvailableError(
                "checkpoint= is not there yet: this version cannot resume a run",
                expected="checkpoint=None",
                found=f"checkpoint={self.checkpoint!r}",
                fix="leave checkpoint= out; Ctrl-C returns the draws so far",
            )

    def plan(self, target: Any) -> Plan:
        """What the chunk program is compiled for.

        Raises:
            SettingsError: ``keep`` names a site that is no latent and no deterministic.
        """
        available = tuple(name for name, site in target.sites.items() if site.kind in ("sample", "deterministic"))
        keep = available if self.keep is None else self.keep
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

    def given_starts(self, target: Any, chains: np.ndarray) -> tuple[dict[str, np.ndarray], bool]:
        """The values of ``init`` for each chain ``(chain, *site)``, and whether they leave nothing to draw.

        Raises:
            ValuesError: ``init`` names something else than a latent.
            ShapeError: a value has neither the site's shape nor that with a leading axis of chains.
        """
        latents = {name: site for name, site in target.sites.items() if site.kind == "sample"}
        given = {}
        for name, value in (self.init or {}).items():
            if name not in latents:
                raise ValuesError(
                    f"init= names '{name}', which is no latent site",
                    expected=f"among {sorted(latents)}",
                    found=f"'{name}'",
                    fix="leave it out: only latents start somewhere",
                )
            site, array = latents[name], np.asarray(value)
            if array.shape == tuple(site.shape):
                array = np.broadcast_to(array, (self.num_chains, *site.shape))
            elif array.shape != (self.num_chains, *site.shape):
                raise ShapeError(
                    "the value of init= has the wrong shape",
                    site=name,
                    source=site.source,
                    expected=f"{tuple(site.shape)} for all chains, or {(self.num_chains, *site.shape)} for each",
                    found=f"{array.shape}",
                    fix="give the site's shape, or stack the starts of the chains along a new leading axis",
                )
            given[name] = array[chains].astype(site.dtype)
        return given, set(given) == set(latents)

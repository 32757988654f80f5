"""``render``: a drawing of a model, with a plate for every scan, vmap and mesh axis."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ppleffects.errors import MissingDependencyError
from ppleffects.interpretations.dependence import parents
from ppleffects.interpretations.layout import Occurrence
from ppleffects.interpretations.program import trace_model
from ppleffects.interpretations.sites import Site, describe

_STYLES = {
    "sample": {"shape": "ellipse", "style": "filled", "fillcolor": "white"},
    "observe": {"shape": "ellipse", "style": "filled", "fillcolor": "lightgray"},
    "factor": {"shape": "square", "style": "filled", "fillcolor": "black", "width": "0.15", "label": ""},
    "deterministic": {"shape": "ellipse", "style": "dashed"},
}


def render(model: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``(*args, **kwargs) -> graphviz.Digraph``: the model as a graph.

    Latents are white, observations gray, deterministics dashed, factors black squares. An arrow says that a value
    reaches another site's distribution. Plates are the scans, vmaps and mesh axes along which a site is repeated. A
    notebook shows the drawing; ``.source`` is its text, and ``.render("model", format="svg")`` writes a file.

    Raises:
        MissingDependencyError: the Python package ``graphviz`` is not installed.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist
        >>> def model(y):
        ...     x = ppl.sample("x", dist.Normal(0.0, 1.0))
        ...     ppl.observe("y", dist.Normal(x, 1.0), y)
        >>> len(ppl.render(model)(0.0).body)
        3
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        program = trace_model(model, args, kwargs).program
        graph = _graphviz().Digraph(program.label)
        root = _Plate()
        for name, occurrence in program.named("sample", "observe", "factor", "deterministic").items():
            root.place(_plates(occurrence), name, describe(occurrence))
        root.draw(graph, "")
        for name, above in parents(program.jaxpr).items():
            for parent in sorted(above):
                graph.edge(_node(parent), _node(name))
        return graph

    return call


def _graphviz() -> Any:
    try:
        return importlib.import_module("graphviz")
    except ImportError as error:
        raise MissingDependencyError(
            "the Python package graphviz is not installed",
            expected="graphviz, and the program dot to make pictures",
            found=f"{error}",
            fix="pip install 'ppleffects[render]'",
        ) from error


def _node(name: str) -> str:
    """A name that Graphviz takes as one: it reads a colon as the start of a port."""
    return name.replace(":", "\u2236")


def _plates(occurrence: Occurrence) -> list[tuple[Any, str]]:
    """The repetitions of a site, outermost first: what tells one plate from another, and its label."""
    plates: list[tuple[Any, str]] = []
    for step in occurrence.path:
        if step.kind == "scan":
            plates.append((id(step.eqn), f"scan {step.eqn.params['length']}"))
        elif step.kind == "shard_map":
            axes = step.mesh_order(step.axes & occurrence.axes)
            plates += [((id(step.eqn), a), f"{a}: {step.mesh_size((a,))} shards") for a in axes]
    for lane in occurrence.site.lanes:
        label = f"vmap {lane.size}" if lane.name is None else f"{lane.name}: {lane.size}"
        plates.append((("lane", lane.name, lane.size), label))
    return plates


class _Plate:
    """A rectangle with the sites and plates that stand in it."""

    def __init__(self, label: str = ""):
        self.label = label
        self.sites: dict[str, Site] = {}
        self.inner: dict[Any, _Plate] = {}

    def place(self, plates: list[tuple[Any, str]], name: str, site: Site) -> None:
        """Puts a site into the plates that it is repeated along."""
        if not plates:
            self.sites[name] = site
            return
        (key, label), *rest = plates
        self.inner.setdefault(key, _Plate(label)).place(rest, name, site)

    def draw(self, graph: Any, path: str) -> None:
        """Adds nodes and plates to a graph."""
        for name, site in self.sites.items():
            label = name if site.dist is None else f"{name}\n{type(site.dist).__name__}"
            graph.node(_node(name), **{"label": label, "tooltip": f"{site.source} {site.shape}", **_STYLES[site.kind]})
        for number, plate in enumerate(self.inner.values()):
            own = f"{path}_{number}"
            with graph.subgraph(name=f"cluster{own}") as inner:
                inner.attr(label=plate.label, labeljust="r", labelloc="b")
                plate.draw(inner, own)

"""A model compiled for all devices, from shapes alone: what its gradient and its sampler hold and send.

Run by ``scale.py`` with the name of a model and its number of rows; prints a line of JSON. Nothing is computed, and no
array is made.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from _cost import collectives, leapfrog_collectives
from _scale_models import MODELS, abstract
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.inference.layout import Layout
from ppleffects.inference.options import Options
from ppleffects.inference.stream import advance_chains, begin_chains

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def on_mesh(tree: Any, shardings: Any = None) -> Any:
    """Shapes with shardings: the given ones, else along the leading axis of what has rows."""

    def placed(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
        spec = P("data") if leaf.ndim and leaf.shape[0] % mesh.size == 0 and leaf.shape[0] >= 2**16 else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or NamedSharding(mesh, spec))

    return jax.tree.map(placed, tree, *([] if shardings is None else [shardings]))


def figures(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Bytes of one device, flops of one device, and collectives."""
    memory: Any = compiled.memory_analysis()
    analysis: Any = compiled.cost_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return {
        "bytes_per_device": total - memory.alias_size_in_bytes,
        "bytes_of_arguments": memory.argument_size_in_bytes,
        "flops_per_device": analysis["flops"],
        "collectives": collectives(compiled.as_text() or ""),
    }


def main() -> None:
    """Compile, read, print."""
    name, num_rows, seconds = sys.argv[1], int(sys.argv[2]), {}
    kernel, layout = ppl.NUTS(), Layout(mesh, None, 1)
    options = Options(1000, 1000, 1, 1, None, (), None, None, None)
    with jax.set_mesh(mesh):
        target: Any = on_mesh(jax.eval_shape(ppl.target(MODELS[name](mesh)), *abstract(name, num_rows)))
        machine, plan = kernel.machine(target, 1000, drawn=True), options.plan(target)
        began = time.perf_counter()
        gradient = jax.jit(jax.value_and_grad(lambda u, target: target.log_density(u)))
        compiled = gradient.lower(on_mesh(target.position_type), target).compile()
        seconds["gradient"], began = time.perf_counter() - began, time.perf_counter()
        found = {"gradient": figures(compiled)}

        key = on_mesh(jax.eval_shape(lambda: jax.random.key(0)))
        chains, static = jax.ShapeDtypeStruct((1,), jnp.int32), {"machine": machine, "layout": layout}
        begin = begin_chains.lower(target, key, on_mesh(chains), {}, None, max_tries=10, **static)
        state = on_mesh(begin.out_info[0], begin.compile().output_shardings[0])
        seconds["start"], began = time.perf_counter() - began, time.perf_counter()
        numbers = [on_mesh(jax.ShapeDtypeStruct((), dtype)) for dtype in (jnp.int32, jnp.int32, bool)]
        compiled = advance_chains.lower(target, state, *numbers, plan=plan, **static).compile()
        seconds["sampler"] = time.perf_counter() - began
        found["sampler"] = figures(compiled) | {"per_leapfrog": leapfrog_collectives(compiled.as_text() or "")}
    print(json.dumps({"model": name, "devices": mesh.size, "rows": num_rows, **found, "seconds_to_compile": seconds}))


if __name__ == "__main__":
    main()

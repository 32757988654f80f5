"""Compiling in the background: XLA needs no Python, so that meanwhile the next program is traced, or a module read."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax


def compile_ahead(program: Any, args: tuple, static: dict[str, Any]) -> Future:
    """Trace a program here and compile it in a thread; a call of it with such arguments then finds it compiled.

    Args:
        program: what ``jax.jit`` returns.
        args: its arguments, or their shapes.
        static: what is static in it.

    Returns:
        A future that raises what the compiler has raised.
    """
    lowered = program.lower(*args, **static)
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ppleffects-compile")
    try:
        return pool.submit(lowered.compile)
    finally:
        pool.shutdown(wait=False)  # the thread ends with its work


def is_uncommitted(tree: Any) -> bool:
    """Whether the arrays are on no device by anybody's wish, so that shapes alone tell what is to be compiled."""
    return not any(isinstance(leaf, jax.Array) and leaf.committed for leaf in jax.tree.leaves(tree))


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Tracing and imports make many objects that stay: to look for dead ones among them takes a tenth of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

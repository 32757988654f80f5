"""Several processes, perhaps on several machines, that run one script together."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax

from ppleffects.effects import _jax
from ppleffects.errors import DistributedError
from ppleffects.inference import watch

__all__ = ["initialize"]


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int = 20,
    local_device_ids: int | Sequence[int] | None = None,
    cluster_detection_method: str | None = None,
    initialization_timeout: int = 300,
    shutdown_timeout_seconds: int = 300,
    coordinator_bind_address: str | None = None,
) -> None:
    """Bring this process together with the others that run the same script; called once, before anything is computed.

    It calls ``jax.distributed.initialize``, which finds what is not given under Slurm, Open MPI and Kubernetes and on
    TPUs. A small program beside each process then watches: when a process
    dies, or ends by an exception, it says which one and how to go on, and ends the others some seconds later. A machine
    that is cut off is noticed after ``heartbeat_timeout_seconds``.

    Args:
        coordinator_address: host and port of the first process, "10.0.0.1:1234": a name by which all others reach it.
        num_processes: number of processes. With 1 and no address nothing is done.
        process_id: the number of this one, from 0.
        heartbeat_timeout_seconds: after so many seconds of silence a process is taken for dead.
        local_device_ids: devices that are this process's; by default all that it sees, under Slurm one GPU.
        cluster_detection_method: as for ``jax.distributed.initialize``.
        initialization_timeout: seconds to wait for the other processes.
        shutdown_timeout_seconds: seconds to wait for them at the end.
        coordinator_bind_address: where the first process listens, if not on every interface.

    Raises:
        DistributedError: it was called before, or after something was computed; what is needed is neither given nor
            found; or the processes do not find each other.

    Example:
        >>> import ppleffects as ppl
        >>> ppl.distributed.initialize(num_processes=1)  # of one process alone
    """
    if num_processes == 1 and coordinator_address is None:
        return
    _check_first()
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids=local_device_ids,
            cluster_detection_method=cluster_detection_method,
            initialization_timeout=initialization_timeout,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            shutdown_timeout_seconds=shutdown_timeout_seconds,
            coordinator_bind_address=coordinator_bind_address,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        given = {
            "coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id
        }  # fmt: skip
        raise DistributedError(
            f"the processes do not come together: {error}",
            expected="coordinator_address, num_processes and process_id, given or found in the environment",
            found=", ".join(f"{name}={value!r}" for name, value in given.items()),
            fix='ppl.distributed.initialize("first-host:1234", num_processes=2, process_id=0), and process_id=1 in the '
            "other; num_processes=1 for one process alone",
        ) from error
    state = _jax.coordination()
    if state.num_processes == 1:
        return
    watch.start(heartbeat_timeout_seconds)
    if state.process_id == 0:
        sys.stderr.write(
            f"ppleffects: {state.num_processes} processes; if one dies, the others stop within "
            f"{heartbeat_timeout_seconds} s and say which; with checkpoint= the same command then goes on\n"
        )


def _check_first() -> None:
    """Raise where it is too late.

    Raises:
        DistributedError: it was called before, or after something was computed.
    """
    if jax.distributed.is_initialized():
        problem, found = "the processes are together already", "a second call"
    elif _jax.has_backends():
        problem, found = "it is too late to bring processes together", "a computation, or a call of jax.devices()"
    else:
        return
    raise DistributedError(
        problem,
        expected="one call, of ppl.distributed.initialize alone, before JAX looks for devices",
        found=found,
        fix="call it once, at the top of the script, right after the imports",
    )

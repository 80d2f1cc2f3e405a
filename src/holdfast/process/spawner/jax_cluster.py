"""How JAX learns of its place: `jax.distributed.initialize()` needs no arguments in a worker.

JAX asks the kinds of clusters that it knows, in their order, for the address of its coordinator, the number of
processes and the id of this one. Environment variables alone do not answer that, so the bootstrap runs this file when
the program imports JAX. The kind of cluster that it adds stands first: inside Slurm the variables of the job step speak
of agents and not of workers. Like the bootstrap, it uses only the standard library and JAX, which is being imported.

Process 0 listens at the coordinator's address. The port is `HOLDFAST_FREE_PORT`, which all nodes know from the sealed
world, or `MASTER_PORT` where the agents serve no store of torch's.
"""

import atexit
import ctypes
import os
import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

clusters: "Any" = import_module("jax._src.clusters")


class HoldfastCluster(clusters.ClusterEnv):  # type: ignore[misc]  # JAX is not installed where types are checked.
    name = "holdfast"

    @classmethod
    def is_env_present(cls) -> bool:
        return all(
            name in os.environ for name in ("HOLDFAST_ROUND", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        )

    @classmethod
    def get_coordinator_address(cls, timeout_secs: object = None, override_coordinator_port: object = None) -> str:
        port = override_coordinator_port or os.environ.get("HOLDFAST_FREE_PORT") or os.environ["MASTER_PORT"]
        host = os.environ["MASTER_ADDR"]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @classmethod
    def get_process_count(cls) -> int:
        return int(os.environ["WORLD_SIZE"])

    @classmethod
    def get_process_id(cls) -> int:
        return int(os.environ["RANK"])

    @classmethod
    def get_local_process_id(cls) -> "int | None":
        """Which device the process has; None for one that is alone on its node and has them all."""
        return int(os.environ["LOCAL_RANK"]) if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1" else None


kinds = clusters.ClusterEnv._cluster_types
kinds.insert(0, kinds.pop())


def ended(exc: BaseException) -> None:
    """Of the program. If it has failed, it does not wait for the other processes, as JAX does for five minutes. Its
    connections stay open until the process ends: closing them takes seconds, so their objects are never freed."""
    if not isinstance(exc, SystemExit) or exc.code:
        atexit.unregister(sys.modules["jax._src.api"].clean_up)
        connections = vars(sys.modules["jax._src.distributed"].global_state)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connections))

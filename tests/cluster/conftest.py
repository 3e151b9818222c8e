"""A Ray cluster on this machine (`make test-ray`)."""

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ray_head() -> Iterator[Any]:
    """A head that does no work."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    class Patient(Cluster):
        """Waits for nodes as long as a busy machine takes to start them."""

        def _wait_for_node(self, node: Any, timeout: float = 600) -> None:
            super()._wait_for_node(node, timeout)

        def wait_for_nodes(self, timeout: float = 600) -> None:
            super().wait_for_nodes(timeout)

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # or Ray warns that it will be so one day
    made = Patient(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def cluster(ray_head: Any) -> Iterator[Any]:
    """The head and two nodes with room for one worker each; no other node is left of the test before."""
    for _ in range(2):
        ray_head.add_node(num_cpus=1)
    ray_head.wait_for_nodes()
    yield ray_head
    for node in list(ray_head.worker_nodes):
        ray_head.remove_node(node, allow_graceful=True)
    ray_head.wait_for_nodes()

"""Join a Ray cluster."""

import socket

from lightning_weave.cluster.ranks import train_on_ray
from lightning_weave.cluster.shards import do_on_ray
from lightning_weave.errors import InputError
from lightning_weave.runs.work import Workers


def connect(address: str | None) -> Workers:
    """Join a Ray cluster, or start one on this machine; returns what does all work there."""
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError("--cluster ray needs Ray: pip install ray, on every node") from None
    if not ray.is_initialized():
        check_address(address)
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise InputError(f"--address {address}: no Ray cluster answers there ({error})") from None
    return Workers(do_on_ray, train_on_ray)


def check_address(address: str | None) -> None:
    """Find out in seconds whether anything listens at HOST:PORT; Ray would retry for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():  # none, or a keyword of Ray's such as auto
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise InputError(
            f"--address {address}: no answer there ({error.strerror or error}). Start a cluster there "
            "(ray start --head), or leave --address out for one on this machine"
        ) from None

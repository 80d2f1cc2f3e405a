"""Where a command looks for the coordinator of a run."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous.client import visitor
from tests.promises import promise


@promise("""steering.commands-rdzv-endpoint-rdzv: Commands by `--rdzv-endpoint` with `--rdzv-backend static` ask at
    `coordinator_port`, not at the port of the workers.""")
@pytest.mark.parametrize(
    ("backend", "endpoint", "config", "place"),
    [
        ("tcp", "host", {}, ("host", 29400)),
        ("c10d", "host:1", {}, ("host", 1)),
        # The endpoint of a static run is where its workers meet.
        ("static", "host:29500", {}, ("host", 29501)),
        ("static", "host:29500", {"coordinator_port": "4711"}, ("host", 4711)),
        ("static", "host:29500", {"coordinator_port": "off"}, "coordinator_port=off: this static run has no"),
        ("static", "host:65535", {}, "there is no port after 65535 for the coordinator; set coordinator_port"),
        ("static", "host", {}, "rendezvous endpoint 'host' has no port; write host:port"),
        ("mine", "host:1", {}, "--rdzv-backend mine: only runs on tcp, static or etcd have a coordinator"),
    ],
)  # fmt: skip
def test_where_the_coordinator_is(
    backend: str, endpoint: str, config: dict[str, Any], place: tuple[str, int] | str
) -> None:
    if isinstance(place, str):
        with pytest.raises(UserError, match=place):
            visitor.find(backend, endpoint, "run", config)
    else:
        assert visitor.find(backend, endpoint, "run", config).address == place

"""Settings of a cluster."""

from typing import Any

NO_FLAGS: dict[str, dict[str, Any]] = {
    "target": {"model": None},
    "draft": {"model": None},
    "gateway": {},
    "ray": {"address": None},
}
CLUSTER: dict[str, Any] = {
    "targets": {
        "chat": {"model": "t", "count": 2, "max": 4, "labels": {"outrider/role": "target"}, "num_gpus": 0.5},
        "code": {"model": "u", "model_name": "coder", "max_slots": 3},
    },
    "drafts": {"small": {"model": "d", "count": 3, "min": 1, "serves": ["chat", "code"]}},
    "gateways": 2,
    "gateway": {"port": 9000, "grpc_port": 9001},
    "ray": {"address": "head:6379", "name": "prod"},
    "scaling": {"up_after_s": 2},
}

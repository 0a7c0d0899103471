"""`python -m deploy.env_example`: prints .env.example, made from the settings' own classes."""

from __future__ import annotations

import sys
import textwrap

from pydantic_core import PydanticUndefined

from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig

_HEAD = """\
# Settings of `docker compose`: copy this file to .env and take the # from what you change. .env holds no secret: keys
# and certificates are files below OUTRIDER_SECRETS_DIR. Written by `make env-example`; docs/deploy.md explains it.

# --- docker compose itself ---

# A folder with a model of yours, which is served under the folder's name, and one with its draft. Without DRAFT it is
# served without one; without MODEL the demo pair is served.
#MODEL=
#DRAFT=
# Address of this machine that the gateway is published on.
#OUTRIDER_BIND=127.0.0.1
#OUTRIDER_HTTP_PORT=8000
#OUTRIDER_GRPC_PORT=8001
# Those of the gateway's /metrics, /sd and /readyz, in plain HTTP and without a key.
#OUTRIDER_METRICS_BIND=127.0.0.1
#OUTRIDER_METRICS_PORT=9000
# Those of Prometheus, which asks nobody for a password, and of Grafana; nothing else is published.
#PROMETHEUS_BIND=127.0.0.1
#PROMETHEUS_PORT=9090
#GRAFANA_BIND=127.0.0.1
#GRAFANA_PORT=3000
# File with the password of Grafana's user admin at its first start, such as /etc/outrider/secrets/admin-password, which
# is grafana/admin-password below OUTRIDER_SECRETS_DIR. Without one the password is admin.
#GRAFANA_PASSWORD_FILE=
# What Prometheus keeps at most: time, and bytes on disk.
#PROMETHEUS_RETENTION=15d
#PROMETHEUS_RETENTION_SIZE=4GB
# The pools: models, counts, placement. Absent = one of deploy/docker/cluster*.yaml, by MODEL and DRAFT.
#OUTRIDER_CLUSTER_FILE=
# Folders as `outrider certs` makes them: gateway, launcher, draft, target, public; and grafana. Each part sees its
# own alone. A token of the hub, for models that ask for one, is a file hf-token in draft and in target.
#OUTRIDER_SECRETS_DIR=./deploy/docker/secrets
# Of the launcher, as TLS_DIR of the parts below; ray.tls_dir of the file of pools wins.
#OUTRIDER_LAUNCHER_TLS_DIR=
# false lets workers fetch models from a hub.
#OUTRIDER_CLUSTER_INTERNAL=true
# Whole CPUs of a node, and the most memory; a pool's num_cpus must fit its node.
#OUTRIDER_CPUS_DRAFT=1
#OUTRIDER_CPUS_TARGET=1
#OUTRIDER_CPUS_GATEWAY=1
#OUTRIDER_CPUS_HEAD=1
#OUTRIDER_MEMORY_DRAFT=3g
#OUTRIDER_MEMORY_TARGET=4g
#OUTRIDER_MEMORY_GATEWAY=1g
#OUTRIDER_MEMORY_HEAD=2g
# The GPUs of docker-compose.gpu.yml, by number or UUID: workers of the same one share its memory.
#OUTRIDER_GPU_DRAFT=0
#OUTRIDER_GPU_TARGET=0
# How long a container may take to end; by some seconds longer than every drain_timeout_s here and of the pools.
#OUTRIDER_STOP_GRACE=30s
# What the images are called, built from, and where pip looks for torch besides its own index: an index of CPU builds
# makes the CPU image a third of the size.
#OUTRIDER_IMAGE_GATEWAY=outrider-gateway
#OUTRIDER_IMAGE_WORKER=outrider-worker
#PYTHON_IMAGE=python:3.11-slim
#TORCH_INDEX_URL=
"""

_PARTS: dict[str, tuple[str, type[GatewayConfig] | type[DraftConfig] | type[TargetConfig], tuple[str, ...]]] = {
    "gateway": (
        "",
        GatewayConfig,
        (
            "registry",
            "host",
            "port",
            "grpc_port",
            "target",
            "draft",
            "target_for_draft",
            "model_name",
            "metrics_port",
        ),
    ),
    "target": (
        "Of every target pool; values in the file of pools override these.",
        TargetConfig,
        ("model", "host", "port"),
    ),
    "draft": (
        "Of every draft pool; values in the file of pools override these.",
        DraftConfig,
        ("model", "host", "port"),
    ),
}
"""By part: a remark, the class of its settings, and the names of settings that docker-compose.yml or the file of pools
sets."""


_WHERE = {"gateway": "docker-compose.yml", "target": "the file of pools", "draft": "the file of pools"}
"""By part: the file that sets the settings which .env does not."""


def env_example() -> str:
    """Return the text of .env.example."""
    parts = [_HEAD]
    for role, (remark, cls, elsewhere) in _PARTS.items():
        heading = f"# --- the {role} ---\n"
        if remark:
            heading += f"# {remark}\n"
        parts.append(heading)
        for name in cls.model_fields:
            description = cls.model_fields[name].description or ""
            if name in elsewhere:
                description += f" Not from here: {_WHERE[role]} sets it."
            parts.append(_setting(cls, name, description))
    return "\n".join(parts)


def _setting(cls: type[GatewayConfig] | type[DraftConfig] | type[TargetConfig], name: str, description: str) -> str:
    words = " ".join(description.split())
    lines = textwrap.wrap(words, 119, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    variable = f"{cls.model_config['env_prefix']}{name}".upper()
    return "\n".join([*lines, f"#{variable}={_text(cls.model_fields[name].default)}"]) + "\n"


def _text(default: object) -> str:
    if default in (None, PydanticUndefined):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return str(default)


if __name__ == "__main__":
    sys.stdout.write(env_example())

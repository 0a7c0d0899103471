"""What service processes import, once, in the process that they are forked from. Importing this computes nothing."""

import pytest  # noqa: F401  a forked process looks at the main module of the one that asked for it
import torch  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
import uvloop  # noqa: F401

import gateway.api.app
import gateway.api.grpc_api
import gateway.api.http_server
import gateway.coordinator
import gateway.workers.named_workers
import gateway.workers.registry_client  # noqa: F401
import outrider.wire.transport.serving  # noqa: F401
import target_service.servicer
import target_service.step.verifier  # noqa: F401

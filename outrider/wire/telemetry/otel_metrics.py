"""OpenTelemetry metrics for generative-AI servers, made by the gateway if `trace_endpoint` is set.

Names, units, buckets and attributes are those of OpenTelemetry's semantic conventions for generative AI (which are in
development).
"""

from __future__ import annotations

import os
from typing import Any

from outrider.wire.errors import ConfigError
from outrider.wire.telemetry.trace import (
    check_endpoint,
    limit_exporter_log,
    not_installed,
    resource_attributes,
    shut_down,
)

PROVIDER = "outrider"
"""Value of the attribute `gen_ai.provider.name`, by which OpenTelemetry's conventions name the software that serves the
model."""
# Bounds of the conventions' buckets, in seconds.
_REQUEST_S = tuple(0.01 * 2**power for power in range(14))
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class ServerMetrics:
    """Histograms of the times of requests and choices. A thread of OpenTelemetry's SDK sends them to a collector every
    OTEL_METRIC_EXPORT_INTERVAL ms.
    """

    def __init__(self, endpoint: str, service: str) -> None:
        """Start the sending thread. endpoint: URL of the OTLP endpoint (gRPC). service: name of this process,
        "gateway". Raises ConfigError if the endpoint cannot be used or OpenTelemetry is not installed.
        """
        check_endpoint(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk import metrics, resources
            from opentelemetry.sdk.metrics import export
        except ImportError:
            raise not_installed(endpoint) from None
        try:
            self._exporter: Any = OTLPMetricExporter(endpoint=endpoint)
            reader = export.PeriodicExportingMetricReader(self._exporter)
            resource = resources.Resource.create(resource_attributes(service)).merge(
                resources.OTELResourceDetector().detect()
            )
            self._provider: Any = metrics.MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        except Exception as error:  # the SDK raises many types
            raise ConfigError(f"OpenTelemetry refuses what the environment (OTEL_*) says: {error}") from None
        limit_exporter_log()
        meter: Any = self._provider.get_meter("outrider")

        def seconds(name: str, text: str, bounds: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                f"gen_ai.server.{name}", "s", text, explicit_bucket_boundaries_advisory=bounds
            )

        self._request = seconds("request.duration", "Request to its last byte.", _REQUEST_S)
        self._first_token = seconds("time_to_first_token", "Admission to first token.", _FIRST_TOKEN_S)
        self._per_token = seconds("time_per_output_token", "Time per token after the first.", _TOKEN_S)

    def note_request(self, operation: str, model: str | None, seconds: float, error: str | None) -> None:
        """Record the duration of a request that has ended. operation: name of the operation in OpenTelemetry's
        conventions, such as "chat". model: the model that the request names; None = it names none. error: class of the
        error that ended the request; None = it succeeded.
        """
        attributes = _attributes(operation, model)
        if error is not None:
            attributes["error.type"] = error
        self._request.record(seconds, attributes)

    def note_answer(self, operation: str, model: str, first_token_s: float, per_token_s: float | None) -> None:
        """Record the times of a choice that ended without an error. operation: name of the operation in OpenTelemetry's
        conventions. first_token_s: seconds from admission to the first token. per_token_s: mean seconds per token after
        the first; None = there was only one token.
        """
        attributes = _attributes(operation, model)
        self._first_token.record(first_token_s, attributes)
        if per_token_s is not None:
            self._per_token.record(per_token_s, attributes)

    def close(self) -> None:
        """Send the last values, waiting at most trace.CLOSE_S seconds, and end the thread. Idempotent."""
        shut_down(self._provider, self._exporter)


def _attributes(operation: str, model: str | None) -> dict[str, str]:
    attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER}
    if model is not None:
        attributes["gen_ai.request.model"] = model
        attributes["gen_ai.response.model"] = model
    return attributes


def open_metrics(endpoint: str | None, service: str) -> ServerMetrics | None:
    """Return a new ServerMetrics. None = metrics are off, because `endpoint` is None or OTEL_METRICS_EXPORTER is
    "none".

    service: name of this process. Raises ConfigError if the endpoint cannot be used or OpenTelemetry is not installed.
    """
    if endpoint is None or os.environ.get("OTEL_METRICS_EXPORTER") == "none":
        return None
    return ServerMetrics(endpoint, service)

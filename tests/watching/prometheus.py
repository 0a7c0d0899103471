"""A real Prometheus that reads a gateway every second, by the product's own configuration and rules."""

import math
import re
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.prometheus.binaries import find
from tests.forked import REPO

FOLDER = REPO / "deploy/prometheus"
WINDOW_S, HISTORY_S = 10, 120
"""What the rules' 5 minutes and hour, and their day and week become."""
STEP_S = 2.0
"""Between two samples of a course."""
START_S = 30.0


@dataclass(frozen=True, slots=True)
class Line:
    """Samples of one series that are numbers."""

    labels: dict[str, str]
    times_s: list[float]
    """Unix."""
    values: list[float]


class Prometheus:
    """Running from construction to `close`; `folder` is its own."""

    def __init__(self, folder: Path, gateway: str, labels: dict[str, str] | None = None) -> None:
        """`gateway`: host:port of its HTTP. `labels`: that its series get. Raises NotFound where there is no Prometheus
        to run.
        """
        config = _config(folder, gateway, labels or {})
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        with (folder / "prometheus.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    str(find("prometheus")),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._http = httpx.Client(base_url=f"http://{address}", timeout=20)
        try:
            self._wait_ready(folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def course(self, expr: str, start_s: float, end_s: float, step_s: float = STEP_S) -> list[Line]:
        """The query over time, without what is no number. Raises RuntimeError with Prometheus' words."""
        params = {"query": expr, "start": start_s, "end": end_s, "step": step_s}
        return _lines(self._ask("query_range", **params)["result"], "values")

    def now(self, expr: str) -> list[Line]:
        return _lines(
            [each | {"values": [each["value"]]} for each in self._ask("query", query=expr)["result"]], "values"
        )

    def label_values(self, label: str, series: str) -> list[str]:
        return [str(value) for value in self._ask(f"label/{label}/values", **{"match[]": series})]

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {each["labels"]["alertname"] for each in self._ask("alerts")["alerts"] if each["state"] == "firing"}

    def fired(self, start_s: float, end_s: float) -> set[str]:
        """Return the names of the alerts that have fired at some moment of that time (Unix seconds)."""
        return {line.labels["alertname"] for line in self.course('ALERTS{alertstate="firing"}', start_s, end_s, 1.0)}

    def scraped(self) -> dict[str, dict[str, str]]:
        """Labels of what is read and answers, by its URL."""
        active = self._ask("targets", state="active")["activeTargets"]
        return {each["scrapeUrl"]: each["labels"] for each in active if each["health"] == "up"}

    def _ask(self, what: str, **params: str | float) -> Any:
        told = self._http.get(f"/api/v1/{what}", params=params).json()
        if told["status"] != "success":
            raise RuntimeError(f"{told['errorType']}: {told['error']}")
        return told["data"]

    def _wait_ready(self, folder: Path) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                if self._http.get("/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Prometheus did not start: {(folder / 'prometheus.log').read_text()}")
            time.sleep(0.1)


def _config(folder: Path, gateway: str, labels: dict[str, str]) -> Path:
    """The product's files with our gateway, read every second, and with shorter spans in the rules."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text().replace("gateway:9000", gateway))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        for gateways in job.get("static_configs", ()):
            gateways["labels"] = labels
        for source in job.get("http_sd_configs", ()):
            source["refresh_interval"] = "2s"
    (folder / "rules").mkdir()
    for path in (FOLDER / "rules").glob("*.yml"):
        (folder / "rules" / path.name).write_text(hastened(path.read_text()))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    return folder / "prometheus.yml"


def hastened(rules: str) -> str:
    """The same rules over seconds: what a test cannot wait for."""
    rules = rules.replace("[15m]", f"[{HISTORY_S}s]").replace("offset 15m", f"offset {HISTORY_S}s")
    rules = rules.replace("[7d] offset 1h", f"[{HISTORY_S}s] offset {WINDOW_S}s").replace("[1h]", f"[{WINDOW_S}s]")
    rules = rules.replace("[5m]", f"[{WINDOW_S}s]").replace("[1d] offset 1h", f"[{HISTORY_S}s] offset {WINDOW_S}s")
    # A tenth of the first tokens, in a 360th of the time: a share of 36 is still no noise.
    rules = rules.replace("> 360", "> 36")
    return re.sub(r"(?m)^( +for:) .*$", r"\1 3s", rules)


def _lines(found: list[Any], key: str) -> list[Line]:
    lines = []
    for each in found:
        samples = [(float(at), float(value)) for at, value in each[key] if math.isfinite(float(value))]
        if samples:
            lines.append(Line(each["metric"], [at for at, _ in samples], [value for _, value in samples]))
    return lines

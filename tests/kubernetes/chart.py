"""What `helm template` renders and `helm lint` says: Helm itself, as the library that helm-python-sdk ships."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tests.forked import REPO

CHART = REPO / "deploy/helm/outrider"
RELEASE, NAMESPACE = "prod", "serving"
EXAMPLES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
Manifest = dict[str, Any]
Values = dict[str, Any]


def values_of(path: Path) -> Values:
    return helm_python.values_from_yaml(path.read_text())


def rendered(values: Values) -> list[Manifest]:
    """The manifests of a release with these values over the chart's. Raises helm_python.HelmError."""
    with _chart() as chart:
        texts = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    files = [text for name, text in sorted(texts.items()) if name.endswith(".yaml")]
    return [one for text in files for one in yaml.safe_load_all(text) if one]


@functools.cache
def example(name: str) -> list[Manifest]:
    """Not to be changed."""
    (path,) = [path for path in EXAMPLES if path.stem == name]
    return rendered(values_of(path))


def complaints(values: Values) -> list[str]:
    """What the linter warns of, or refuses."""
    report = helm_python.lint(CHART, values, namespace=NAMESPACE)
    return [f"{one['path']}: {one['error']}" for one in report["messages"] if one["severity"] > 1]


def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)

"""What `helm template` renders and `helm lint` says: Helm itself, as the library that helm-python-sdk ships."""

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forked import REPO

helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this machine")
HelmError = helm_python.HelmError

CHART = REPO / "deploy/helm/outrider"
RELEASE, NAMESPACE = "prod", "serving"
FULLNAME = f"{RELEASE}-outrider"
EXAMPLES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
VERSION = helm_python.helm_sdk_version()
Manifest = dict[str, Any]
Values = dict[str, Any]


def values_of(path: Path) -> Values:
    values: Values = helm_python.values_from_yaml(path.read_text())
    return values


def rendered(values: Values, release: str = RELEASE, path: Path = CHART) -> list[Manifest]:
    """The manifests of a release with these values over the chart's, a folder or an archive. Raises HelmError."""
    with helm_python.Chart.load(path) as chart:
        texts = chart.render(values, name=release, namespace=NAMESPACE)
    files = [text for name, text in sorted(texts.items()) if name.endswith(".yaml")]
    return [one for text in files for one in yaml.load_all(text, yaml.CSafeLoader) if one]


@functools.cache
def example(name: str) -> list[Manifest]:
    """Not to be changed."""
    (path,) = [path for path in EXAMPLES if path.stem == name]
    return rendered(values_of(path))


def complaints(values: Values, path: Path = CHART) -> list[str]:
    """What the linter warns of, or refuses."""
    report = helm_python.lint(path, values, namespace=NAMESPACE)
    return [f"{one['path']}: {one['error']}" for one in report["messages"] if one["severity"] > 1]

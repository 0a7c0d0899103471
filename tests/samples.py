"""Sums over what tests.stack.read_metrics returns, whatever labels a series carries besides those asked for."""

import math
import re
from collections.abc import Mapping


def total(samples: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum of the samples of this name whose labels include these; 0 when there is none."""
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    return math.fsum(value for sample, value in samples.items() if _matches(sample, name, wanted))


def _matches(sample: str, name: str, wanted: set[str]) -> bool:
    bare, _, rest = sample.partition("{")
    return bare == name and wanted <= set(re.findall(r'\w+="[^"]*"', rest))

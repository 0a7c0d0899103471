"""`make check-kubernetes [ARGS=VALUES.yaml]`: lints the chart and renders it, and holds each manifest against its schema.

With the values in tests/kubernetes/values, or those named; a line for each manifest, exit code 1 when one is refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

import helm_python

from tests.kubernetes.chart import EXAMPLES, complaints, rendered, values_of
from tests.kubernetes.check import problem


def main(paths: list[Path]) -> int:
    num_refused = 0
    print(f"Helm {helm_python.helm_sdk_version()}")
    for path in paths:
        values = values_of(path)
        try:
            found = [("chart", said) for said in complaints(values)]
            found += [(f"{one['kind']} {one['metadata']['name']}", problem(one)) for one in rendered(values)]
        except helm_python.HelmError as error:
            found = [("chart", str(error))]
        for what, reason in found:
            num_refused += reason is not None
            name = f"{path.stem}: {what}"
            print(f"ok       {name}" if reason is None else f"REFUSED  {name}: {reason}")
    return min(num_refused, 1)


if __name__ == "__main__":
    sys.exit(main([Path(each) for each in sys.argv[1:]] or EXAMPLES))

"""`make check-kubernetes [ARGS=VALUES.yaml]`: lints and renders the chart, holds each manifest against its schema.

And what it tells a part against the part's settings. With the values in tests/kubernetes/values, or those named. A line
for each manifest, exit code 1 when one is refused.
"""

import argparse
import sys
from pathlib import Path

import pytest

try:
    from tests.kubernetes.chart import EXAMPLES, VERSION, HelmError, complaints, rendered, values_of
    from tests.kubernetes.check import problem
except pytest.skip.Exception as error:  # without Helm, for which the tests are skipped
    sys.exit(f"{error}; run it where `make setup` installs one, as on Linux on x86-64")


def main(paths: list[Path]) -> int:
    num_refused = 0
    print(f"Helm {VERSION}")
    for path in paths:
        try:
            values = values_of(path)
            found = [(f"{one['kind']} {one['metadata']['name']}", problem(one)) for one in rendered(values)]
            found += [("chart", said) for said in complaints(values)]
        except HelmError as error:
            found = [("chart", str(error))]
        except (OSError, UnicodeDecodeError) as error:
            found = [("values", f"cannot be read: {error}")]
        for what, reason in found:
            num_refused += reason is not None
            name = f"{path.stem}: {what}"
            print(f"ok       {name}" if reason is None else f"REFUSED  {name}: {reason}")
    return min(num_refused, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make check-kubernetes ARGS=...", description=__doc__)
    parser.add_argument("values", nargs="*", type=Path, help="files over the chart's own values.yaml, each by itself")
    sys.exit(main(parser.parse_args().values or EXAMPLES))

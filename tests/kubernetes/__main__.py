"""`make check-kubernetes`: a line for each manifest of the base and the overlays; exit code 1 when one is refused."""

from __future__ import annotations

import sys

from tests.kubernetes.build import Manifest, built, documents
from tests.kubernetes.check import FOLDER, problem


def manifests_by_source() -> dict[str, list[Manifest]]:
    folders = [FOLDER / "base", *sorted((FOLDER / "overlays").iterdir())]
    examples = FOLDER / "secrets.example.yaml"
    return {**{str(one.relative_to(FOLDER)): built(one) for one in folders}, examples.name: documents(examples)}


def main() -> int:
    num_refused = 0
    for source, manifests in manifests_by_source().items():
        for manifest in manifests:
            reason = problem(manifest)
            num_refused += reason is not None
            name = f"{source}: {manifest['kind']} {manifest['metadata']['name']}"
            print(f"ok       {name}" if reason is None else f"REFUSED  {name}: {reason}")
    return min(num_refused, 1)


if __name__ == "__main__":
    sys.exit(main())

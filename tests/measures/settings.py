"""Print the settings by process and the numeric module constants by package, of this checkout and of others.

    make settings ARGS=/path/to/another/checkout  # or: python -m tests.measures.settings [CHECKOUT ...]

Read from the source, so that a checkout of any age can be given.
"""

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "outrider", "draft_service", "target_service", "deploy")
NOT_COUNTED = ("outrider/cli", "outrider/client", "outrider/v1")
CLASSES = ("TargetConfig", "DraftConfig", "GatewayConfig", "RayConfig", "ScalingConfig")


def settings(checkout: Path) -> dict[str, int]:
    """Return the fields of each process's settings, those of its base classes included."""
    classes: dict[str, ast.ClassDef] = {}
    for path in (checkout / "outrider").rglob("*.py"):
        classes |= {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}

    def fields(name: str) -> int:
        if name not in classes:
            return 0
        node = classes[name]
        bases = sum(fields(base.id) for base in node.bases if isinstance(base, ast.Name))
        return bases + sum(isinstance(each, ast.AnnAssign) for each in node.body)

    return {name: fields(name) for name in CLASSES}


def constants(checkout: Path) -> dict[str, int]:
    """Return the upper-case names by package that a module gives a number, or an expression of numbers."""
    found = dict.fromkeys(PACKAGES, 0)
    for package in PACKAGES:
        for path in (checkout / package).rglob("*.py"):
            if not str(path.relative_to(checkout)).startswith(NOT_COUNTED):
                found[package] += sum(map(_is_constant, ast.parse(path.read_text()).body))
    return found


def _is_constant(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target, value = node.target, node.value
    else:
        return False
    numbers = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    is_number = all(isinstance(each, numbers) for each in ast.walk(value))
    leaves = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
    named = isinstance(target, ast.Name) and target.id.isupper()
    return named and is_number and all(type(leaf) in (int, float) for leaf in leaves)


def show(name: str, counts: Mapping[str, int]) -> None:
    print(f"  {name}: {sum(counts.values())} ({', '.join(f'{key} {count}' for key, count in counts.items())})")


def main(checkouts: list[Path]) -> None:
    for checkout in [*checkouts, HERE]:
        print(checkout)
        show("settings", settings(checkout))
        show("numeric constants", constants(checkout))


if __name__ == "__main__":
    main([Path(arg) for arg in sys.argv[1:]])

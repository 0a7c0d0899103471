"""The GPU kit's parent: what becomes of sections that fail in every way, its documents, its wheels and its start."""

from __future__ import annotations

import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

import benchmarks.gpu.__main__ as kit
from benchmarks.gpu import wheels
from benchmarks.gpu.document import Document
from benchmarks.gpu.profile import summarized
from benchmarks.gpu.runner import Outcome, run_sections
from benchmarks.gpu.sections import BY_NAME, FAST, KIT_LIMIT_S, RIGHT, START_S, Section
from benchmarks.tables import markdown_table

ENOUGH_S = 60
"""Seconds for a section that does next to nothing, on a machine that does much else."""


def planted(*names: str, limit_s: int = ENOUGH_S) -> list[Outcome]:
    return [
        Outcome(Section(name, limit_s, f"planted {name}", f"tests.unit.gpu_sections.{name}", needs_torch=False))
        for name in names
    ]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_whatever_a_section_does_the_others_are_told(tmp_path: Path) -> None:
    outcomes = [*planted("hangs", limit_s=2), *planted("crashes", "finds", "exhausts", "killed", "well")]
    said: list[str] = []
    document = Document(tmp_path, "planted", "A head.", outcomes)
    run_sections(
        outcomes, rehearse=True, write=document.write, say=said.append, deadline_s=time.monotonic() + 6 * ENOUGH_S
    )
    states = {outcome.section.name: outcome.state for outcome in outcomes}
    assert states == {
        "hangs": "over its limit",
        "crashes": "crashed",
        "finds": "findings",
        "exhausts": "crashed",
        "killed": "killed",
        "well": "ok",
    }
    assert [line.split()[0] for line in said] == list(states)
    hung = next(event for event in outcomes[0].events if event["kind"] == "started")
    assert not any(is_running(hung[name]) for name in ("pid", "own"))
    assert not Path(hung["folder"]).exists()
    assert any("hangs.py" in line and "in run" in line for line in outcomes[0].log)

    assert {path.name for path in tmp_path.iterdir()} == {"gpu-planted.json", "gpu-planted.md"}
    found = {each["name"]: each for each in json.loads((tmp_path / "gpu-planted.json").read_text())["sections"]}
    assert found["crashes"]["events"][0] == {"kind": "row", "name": "before"}
    assert found["crashes"]["summary"] == "ZeroDivisionError: planted"
    assert found["exhausts"]["summary"] == "MemoryError"
    assert "SIGKILL" in found["killed"]["summary"] and found["killed"]["events"][0]["name"] == "before"
    assert found["finds"]["summary"] == "something is wrong (and 1 more)"
    assert found["well"]["summary"] == "all is well"
    written = (tmp_path / "gpu-planted.md").read_text()
    for words in (
        "ZeroDivisionError: planted",
        "crashes.py",
        "- **and more**",
        "| b | 2.5 | \\| |",
        "killed at its limit, after 2 s",
    ):
        assert words in written, written


def test_a_kit_ends_at_its_own_limit(tmp_path: Path) -> None:
    outcomes = planted("hangs", "well")
    run_sections(outcomes, rehearse=False, write=lambda: None, say=lambda line: None, deadline_s=time.monotonic() + 1.5)
    assert [outcome.state for outcome in outcomes] == ["over its limit", "not run"]


def test_a_section_has_what_those_before_it_left_of_their_limits() -> None:
    outcomes = [*planted("well"), *planted("sleeps", limit_s=1)]
    run_sections(outcomes, rehearse=False, write=lambda: None, say=lambda line: None, deadline_s=time.monotonic() + 120)
    assert [outcome.state for outcome in outcomes] == ["ok", "ok"] and outcomes[1].seconds > outcomes[1].section.limit_s


def test_what_needs_a_card_says_so_in_a_rehearsal() -> None:
    (outcome,) = outcomes = [Outcome(Section("waits", 1, "of a card", needs_card=True))]
    said: list[str] = []
    run_sections(outcomes, rehearse=True, write=lambda: None, say=said.append, deadline_s=time.monotonic() + 9)
    assert outcome.state == "needs a card" and outcome.is_well and "needs a card" in said[0]


@pytest.mark.parametrize("sections", [RIGHT, FAST], ids=["right", "fast"])
def test_the_limits_of_a_kit_add_up(sections: tuple[Section, ...]) -> None:
    assert START_S + sum(section.limit_s for section in sections) <= KIT_LIMIT_S
    for section in (*sections, *BY_NAME):
        path = Path(kit.REPO, *section.path.split(".")).with_suffix(".py")
        assert "def run(bench: Bench)" in path.read_text(), path


def test_the_packages_description_has_the_limits() -> None:
    described = Path(kit.REPO, "benchmarks/gpu/__init__.py").read_text()
    for section in (*RIGHT, *FAST):
        assert f"| {section.name} | {section.limit_s} |" in described, section.name


def test_without_a_gpu_it_says_so_and_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(kit, "count_gpus", lambda: 0)
    assert kit.main(["right", "--out", str(tmp_path)]) == kit.EXIT_NO_GPU
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="no kit and no section 'lows'"):
        kit.main(["lows", "--rehearse"])
    with pytest.raises(SystemExit, match="right has no section served"):
        kit.main(["right", "--rehearse", "--only", "served"])


def wheel(folder: Path, name: str, version: str, tags: str) -> Path:
    path = folder / f"{name}-{version}-{tags}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
    return path


def test_wheels_are_unpacked_where_they_are_missing_or_older(tmp_path: Path) -> None:
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder, site = tmp_path / "whl", tmp_path / "site"
    folder.mkdir()
    wheel(folder, "not_here_at_all", "1.0", "py3-none-any")
    wheel(folder, "numpy", "999.0.0", f"{own}-{own}-manylinux_2_28_x86_64")
    wheel(folder, "protobuf", "1.0.0", "py3-none-any")  # older than what is here
    wheel(folder, "of_another_python", "1.0", "cp399-cp399-manylinux_2_28_x86_64")
    wheel(folder, "of_any_python", "1.0", "cp39-abi3-manylinux_2_31_x86_64")
    assert wheels.unpack(site, folder) == ["not-here-at-all 1.0", "numpy 999.0.0", "of-any-python 1.0"]
    assert (site / "not_here_at_all/__init__.py").is_file() and not (site / "protobuf").exists()


def test_every_wheel_has_a_version_and_every_import_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(wheels.pinned()) == set(wheels.PACKAGES)
    assert wheels.missing() == []
    monkeypatch.setattr(wheels, "installed", lambda name: None if name in ("orjson", "torch") else "1")
    assert wheels.missing() == [
        "orjson (module orjson; make gpu-wheels brings it)",
        "torch (module torch; not among the kit's wheels)",
    ]


def test_gaps_of_a_profile_are_what_no_kernel_covers() -> None:
    kernels = [("b", 30.0, 40.0), ("a", 0.0, 10.0), ("a", 5.0, 20.0), ("c", 45.0, 46.0)]
    found: dict[str, Any] = summarized(kernels)
    assert (found["launches"], found["span_ms"], found["busy_ms"]) == (4, 0.046, 0.031)
    assert (found["gaps_ms"], found["longest_gap_ms"]) == (0.015, 0.01)
    assert found["kernels"][0] == ("a", (2, 25.0))


def test_tables_have_their_numbers_to_the_right() -> None:
    assert markdown_table(("a", "b"), [["x", "1"]]) == "| a | b |\n|---|---:|\n| x | 1 |"

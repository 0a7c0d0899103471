"""Compiling the C++ forward: once for a machine, safe beside another worker, and no reason to refuse a model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.engine.native import build, library
from outrider.engine.native.build import BuildError
from tests.unit.outrider.engine.native.served import path_name

LOAD = "from outrider.engine.native.library import library; library(); print('loaded')"


def files(folder: Path) -> list[str]:
    return [path.suffix for path in folder.iterdir()]


@pytest.mark.slow
def test_two_workers_build_a_broken_file_again_and_a_third_needs_no_compiler(
    model: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compile_to", lambda path, _: (cache.mkdir(), path.write_bytes(b"not a library")))
    broken = build.built_library()
    abandoned, under_way = cache / "abandoned.so.part", cache / "under-way.so.part"
    abandoned.touch()
    under_way.touch()
    os.utime(abandoned, (0, 0))
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(cache))
    assert build.built_library() == broken, "the file is there, so nothing was compiled"
    workers = [
        subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for worker in workers:
        out, error = worker.communicate(timeout=110)
        assert (worker.returncode, out.strip()) == (0, "loaded"), error
    assert under_way.exists() and not abandoned.exists()
    under_way.unlink()
    assert broken.stat().st_size > 10_000 and files(cache) == [".so"]
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert path_name(model, "fused") == "fused"


@pytest.mark.parametrize(("mode", "why"), [(0o755, "another account"), (0o775, "written by other")])
def test_a_library_that_another_account_may_have_written_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, mode: int, why: str
) -> None:
    monkeypatch.setattr(build, "compile_to", lambda path, _: (cache.mkdir(), path.write_bytes(b"another's code")))
    path = build.built_library()
    path.chmod(mode)
    if mode == 0o755 and os.getuid() == 0:
        os.chown(path, 1, 1)  # root's own are loaded by everybody
    elif mode == 0o755:
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(BuildError, match=why):
        build.check_owner(path)
    built = list[Path]()
    monkeypatch.setattr(library, "compile_to", lambda path, _: built.append(path))
    monkeypatch.setattr(library.ctypes, "CDLL", lambda _: pytest.fail("it was loaded"))
    with pytest.raises(BuildError, match=why):
        library.library()
    assert built == [path]

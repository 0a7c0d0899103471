"""`make release`: HEAD's wheel, source archive, images, bill of materials, notes and checksums, into dist/.

The same bytes for a commit wherever and whenever it is built, as long as Python and its zlib, the base image and the
packages of the distribution are the same; docs/releases.md says what that rests on.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from deploy.docker.requirements import requirements
from deploy.release.notes import ReleaseError, notes

EXTRAS = ["engine", "quant", "ray", "trace", "certs"]
"""Those of the worker's image; the gateway's has some of them."""
IMAGES = ("gateway", "worker")
NO_ENGINE = 3


def output(command: Sequence[str | Path], **more: str) -> str:
    """Return what a command says on stdout, with these variables set. Raises ReleaseError when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | more)
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} gave {done.returncode}")
    return done.stdout.strip()


def commit_time() -> str:
    """Return when HEAD was committed, in seconds of Unix time. Raises ReleaseError where files differ from it."""
    if differs := output(["git", "status", "--porcelain"]):
        raise ReleaseError(f"the working tree is not what is committed; commit or remove first:\n{differs}")
    return output(["git", "log", "-1", "--format=%ct"])


def extract(tree: Path) -> None:
    """Write the files of HEAD to `tree`: their modes and times are git's, not those of this checkout."""
    archive = subprocess.run(["git", "archive", "HEAD"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tree, filter="data")


def build(tree: Path, dist: Path, epoch: str) -> None:
    """Build the source archive, and the wheel from it."""
    output([sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, tree], SOURCE_DATE_EPOCH=epoch)
    for path in dist.glob("*.tar.gz"):
        settle(path, int(epoch))


def settle(path: Path, epoch: int) -> None:
    """Write a source archive anew without what setuptools leaves of this machine: times, users, the order of files."""
    with tarfile.open(path) as tar:
        files = [(one, tar.extractfile(one)) for one in sorted(tar.getmembers(), key=lambda one: one.name)]
        with io.BytesIO() as plain:
            with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as anew:
                for member, content in files:
                    one = tarfile.TarInfo(member.name)
                    one.type, one.size, one.mode, one.mtime = member.type, member.size, member.mode, epoch
                    anew.addfile(one, content)
            packed = gzip.compress(plain.getvalue(), mtime=epoch)
    path.write_bytes(packed)


def bill(tree: Path, dist: Path, scratch: Path, epoch: str) -> None:
    """Install the wheel with all that its images hold, and list that as CycloneDX."""
    home = scratch / "installed"
    venv.create(home)
    python = home / "bin" / "python"
    (scratch / "requirements.txt").write_text("\n".join(requirements(tree / "pyproject.toml", EXTRAS)))
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    output([*pip, *index(), "-c", tree / "constraints.txt", "-r", scratch / "requirements.txt"])
    # Found by name, not by path: a path would be recorded and differ from one folder to the next.
    output([*pip, "--no-deps", "--no-index", "--find-links", dist, "outrider"])
    listing: list[str | Path] = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    listing += ["--pyproject", tree / "pyproject.toml", "--output-file", dist / "SBOM.cdx.json", python]
    output(listing, SOURCE_DATE_EPOCH=epoch)


def index() -> list[str]:
    """Return pip's arguments for the index of torch's builds, as worker.Dockerfile gives them."""
    url = os.environ.get("TORCH_INDEX_URL")
    return ["--extra-index-url", url] if url else []


def image(name: str, version: str, tree: Path, dist: Path, epoch: str) -> None:
    """Build an image as an OCI archive, every file in it no younger than the commit."""
    archive = dist / f"outrider-{name}-{version}.oci.tar"
    arguments = [f"SOURCE_DATE_EPOCH={epoch}"]
    arguments += [f"{one}={os.environ[one]}" for one in ("PYTHON_IMAGE", "TORCH_INDEX_URL") if one in os.environ]
    output(
        ["docker", "buildx", "build", "--provenance=false", "--no-cache"]
        + [part for one in arguments for part in ("--build-arg", one)]
        + ["--output", f"type=oci,dest={archive},rewrite-timestamp=true", "--tag", f"outrider-{name}:{version}"]
        + ["--file", str(tree / f"deploy/docker/{name}.Dockerfile"), str(tree)]
    )


def checksums(dist: Path) -> str:
    """Return a line for each file, as `sha256sum --check` reads them."""
    lines = []
    for path in sorted(dist.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return "".join(lines)


def release(dist: Path, images: Sequence[str]) -> None:
    """Make everything in `dist`, whose former content goes. Raises ReleaseError where HEAD cannot be released."""
    epoch = commit_time()
    with tempfile.TemporaryDirectory() as folder:
        scratch, tree = Path(folder), Path(folder) / "outrider"
        extract(tree)
        text = notes(tree)
        shutil.rmtree(dist, ignore_errors=True)
        dist.mkdir()
        build(tree, dist, epoch)
        version = next(dist.glob("*.whl")).name.split("-")[1]
        bill(tree, dist, scratch, epoch)
        for name in images:
            # The build of wheel and bill left files of its own in that tree.
            context = scratch / name
            extract(context)
            image(name, version, context, dist, epoch)
        (dist / "NOTES.md").write_text(text, encoding="utf-8")
    sums = checksums(dist)
    (dist / "SHA256SUMS").write_text(sums)
    sys.stdout.write(sums)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--no-images", action="store_true", help="all but the images, which need a Docker engine")
    images = () if parser.parse_args().no_images else IMAGES
    if images and subprocess.run(["docker", "buildx", "inspect"], capture_output=True, check=False).returncode:
        sys.stderr.write("no Docker engine with buildx answers; without images: make release ARGS=--no-images\n")
        return NO_ENGINE
    os.umask(0o022)
    try:
        release(Path("dist"), images)
    except ReleaseError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

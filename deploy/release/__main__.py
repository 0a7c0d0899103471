"""`make release`: HEAD's wheel, source archive, Helm chart, images, bill of materials, notes and checksums, into dist/.

The same bytes for a commit wherever and whenever it is built, as long as Python and its zlib, the base image and the
packages of the distribution are the same; docs/releases.md says what that rests on.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from deploy.docker.requirements import requirements
from deploy.release.notes import ReleaseError, notes, version_of

EXTRAS = ["engine", "quant", "ray", "trace", "certs"]
"""Those of the worker's image; the gateway's has some of them."""
IMAGES = ("gateway", "worker")
CHART = "deploy/helm/outrider"
NO_ENGINE = 3
WITHOUT = "without images: make release ARGS=--no-images"


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


def build(tree: Path, dist: Path, version: str, epoch: str) -> None:
    """Pack the source and the chart, and build the wheel, which leaves files of its own in `tree`."""
    pack(tree, f"outrider-{version}", dist / f"outrider-{version}.tar.gz", int(epoch))
    pack_chart(tree / CHART, dist / f"outrider-{version}.tgz", int(epoch))
    command: list[str | Path] = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, tree]
    output(command, SOURCE_DATE_EPOCH=epoch)


def pack_chart(tree: Path, path: Path, epoch: int) -> None:
    """Write the chart as Helm does, with the rules and dashboards that its links lead to."""
    pack(tree, "outrider", path, epoch, follow_links=True)


def pack(tree: Path, folder: str, path: Path, epoch: int, *, follow_links: bool = False) -> None:
    """Write `tree` as `folder` of a .tar.gz, without what is this machine's of it: times, users, the order of files."""

    def settled(one: tarfile.TarInfo) -> tarfile.TarInfo:
        one.uid, one.gid, one.uname, one.gname, one.mtime = 0, 0, "", "", epoch
        return one

    with io.BytesIO() as plain:
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT, dereference=follow_links) as tar:
            tar.add(tree, folder, filter=settled)  # in the order of their names
        path.write_bytes(gzip.compress(plain.getvalue(), mtime=epoch))


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
    arguments = [f"{one}={os.environ[one]}" for one in ("PYTHON_IMAGE", "TORCH_INDEX_URL") if one in os.environ]
    command = [*exporting(archive, epoch), "--provenance=false", "--no-cache", "--tag", f"outrider-{name}:{version}"]
    command += [part for one in arguments for part in ("--build-arg", one)]
    try:
        output([*command, "--file", str(tree / f"deploy/docker/{name}.Dockerfile"), str(tree)])
    except ReleaseError as error:
        raise ReleaseError(f"the image outrider-{name} was not built, Docker says why above; {WITHOUT}") from error


def exporting(archive: Path | str, epoch: str) -> list[str]:
    """Return the command that builds an image as an OCI archive; "-" is stdout."""
    command = ["docker", "buildx", "build", "--build-arg", f"SOURCE_DATE_EPOCH={epoch}"]
    return [*command, "--output", f"type=oci,dest={archive},rewrite-timestamp=true"]


def check_engine() -> None:
    """Build an image of nothing. Raises ReleaseError where no engine builds and exports one as those of a release."""
    nothing = b"FROM scratch\nLABEL of=nothing\n"
    try:
        done = subprocess.run([*exporting("-", "1"), "-"], input=nothing, capture_output=True, check=False)
        said = done.stderr.decode(errors="replace").strip() if done.returncode else None
    except FileNotFoundError:
        said = "there is no command docker"
    if said is not None:
        raise ReleaseError(
            f"{said}\nThe images need buildx and an engine that exports OCI archives (docs/releases.md); {WITHOUT}"
        )


def checksums(dist: Path) -> str:
    """Return a line for each file, as `sha256sum --check` reads them."""
    lines = []
    for path in sorted(dist.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return "".join(lines)


def release(dist: Path, images: Sequence[str], scratch: Path) -> None:
    """Make everything in `scratch`, and then take it for `dist`, whose former content goes.

    scratch: an empty folder of the same file system. Raises ReleaseError where HEAD cannot be released.
    """
    epoch = commit_time()
    tree, made = scratch / "outrider", scratch / "dist"
    extract(tree)
    text, version = notes(tree), version_of(tree)
    made.mkdir()
    build(tree, made, version, epoch)
    bill(tree, made, scratch, epoch)
    for name in images:
        # The build of wheel and bill left files of its own in that tree.
        context = scratch / name
        extract(context)
        image(name, version, context, made, epoch)
    (made / "NOTES.md").write_text(text, encoding="utf-8")
    sums = checksums(made)
    (made / "SHA256SUMS").write_text(sums)
    if os.path.lexists(dist):
        dist.rename(scratch / "before")
    made.rename(dist)
    sys.stdout.write(sums)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--no-images", action="store_true", help="all but the images, which need a Docker engine")
    images = () if parser.parse_args().no_images else IMAGES
    os.umask(0o022)
    try:
        if images:
            check_engine()
    except ReleaseError as error:
        sys.stderr.write(f"{error}\n")
        return NO_ENGINE
    try:
        with tempfile.TemporaryDirectory(dir=".work") as folder:  # of this file system, and none of git's
            release(Path("dist"), images, Path(folder).resolve())
    except (ReleaseError, OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"{error}\nnothing was released, dist is as it was\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/bin/sh
# Builds HEAD's wheel, source archive, Helm chart, images, bill of materials, notes and checksums into dist/.
#
#     deploy/release.sh [--no-images]
#
# Times in files are the commit's (SOURCE_DATE_EPOCH); docs/releases.md has what else the bytes depend on. Reads PYTHON,
# PYTHON_IMAGE and TORCH_INDEX_URL. Exit code 3 where no Docker engine exports images.
set -eu
umask 022
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
images="gateway worker"
if [ "${1:-}" = --no-images ]; then images=""; fi

fail() {
    echo "$1" >&2
    exit "${2:-1}"
}

# Builds an image as an OCI archive: build_image ARCHIVE ARGUMENT...
build_image() {
    archive=$1
    shift
    docker buildx build --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" \
        --output "type=oci,dest=$archive,rewrite-timestamp=true" "$@"
}

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
if [ -n "$images" ]; then
    printf 'FROM scratch\nLABEL of=nothing\n' | build_image - - >/dev/null ||
        fail "images need docker buildx and an engine that exports OCI archives (docs/releases.md), or --no-images" 3
fi
if [ -n "$(git status --porcelain)" ]; then
    fail "the working tree is not what is committed; commit or remove first: $(git status --porcelain)"
fi

mkdir -p .work
scratch=$(mktemp -d "$PWD/.work/release-XXXXXX") # of this file system, so that dist is replaced by a rename
trap 'rm -rf "$scratch"' EXIT
tree=$scratch/tree
dist=$scratch/dist
mkdir "$tree" "$dist"
git archive HEAD | tar -x -C "$tree" # modes and times are git's, not this checkout's
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$tree/pyproject.toml")

# Notes: the version's part of the CHANGELOG.
awk -v version="$version" '
    BEGIN { print "# Outrider " version }
    /^## \[/ { is_own = index($0, "[" version "]") || $0 == "## [Unreleased] - " version; next }
    is_own { print }' "$tree/CHANGELOG.md" >"$dist/NOTES.md"
grep -q '^- ' "$dist/NOTES.md" || fail "CHANGELOG.md has no entries under [$version]"

# Source archive, chart and wheel.
git archive --format=tar.gz --prefix="outrider-$version/" --output "$dist/outrider-$version.tar.gz" HEAD
if command -v helm >/dev/null; then
    helm package "$tree/deploy/helm/outrider" --destination "$dist"
else # a chart is the .tgz of its folder, with what its links lead to
    tar -c --dereference --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
        -C "$tree/deploy/helm" outrider | gzip -n >"$dist/outrider-$version.tgz"
fi
$python -m venv .work/release
.work/release/bin/pip install --quiet --only-binary :all: -r deploy/release-requirements.txt
.work/release/bin/python -m build --wheel --no-isolation --outdir "$dist" "$tree"

# Bill of materials: the wheel, with all that the worker's image holds of Python.
.work/release/bin/python -m venv --without-pip "$scratch/installed"
pip() {
    .work/release/bin/pip --python "$scratch/installed/bin/python" install --quiet "$@"
}
(cd "$tree" && "$root/.work/release/bin/python" deploy/docker/requirements.py engine quant ray trace certs) \
    >"$scratch/requirements.txt"
pip ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -c "$tree/constraints.txt" -r "$scratch/requirements.txt"
pip --no-deps --no-index --find-links "$dist" outrider # by name: a path would be recorded, and differ between machines
.work/release/bin/cyclonedx-py environment --output-reproducible --pyproject "$tree/pyproject.toml" \
    --output-file "$dist/SBOM.cdx.json" "$scratch/installed/bin/python"

for name in $images; do
    context=$scratch/$name # a tree without the files of the build above
    mkdir "$context"
    git archive HEAD | tar -x -C "$context"
    build_image "$dist/outrider-$name-$version.oci.tar" --provenance=false --no-cache \
        ${PYTHON_IMAGE:+--build-arg "PYTHON_IMAGE=$PYTHON_IMAGE"} \
        ${TORCH_INDEX_URL:+--build-arg "TORCH_INDEX_URL=$TORCH_INDEX_URL"} \
        --tag "outrider-$name:$version" --file "$context/deploy/docker/$name.Dockerfile" "$context"
done

(cd "$dist" && sha256sum -- * >"$scratch/SHA256SUMS")
mv "$scratch/SHA256SUMS" "$dist"
rm -rf dist
mv "$dist" dist
cat dist/SHA256SUMS

#!/bin/sh
# Build the documentation site into .work/site; a dead link or anchor fails. Argument: mkdocs. To look at it:
# python -m http.server --directory .work/site
set -e
source=.work/docs-src
rm -rf $source
mkdir -p $source/benchmarks
ln -s "$PWD/docs" "$PWD"/*.md "$PWD/LICENSE" $source/
ln -s "$PWD/benchmarks/results" $source/benchmarks/
for file in models/*/README.md; do
    mkdir -p "$source/$(dirname "$file")"
    ln -s "$PWD/$file" "$source/$file"
done
NO_MKDOCS_2_WARNING=1 "$1" build --strict
echo "the site is in .work/site"

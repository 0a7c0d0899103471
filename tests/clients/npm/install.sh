# Install the agents of package-lock.json, 1.8 GB, with the node of coding.txt: sh install.sh FOLDER_OF_ENVIRONMENTS
set -eu
mkdir -p "$1/npm"
cp "$(dirname "$0")"/package*.json "$1/npm"
PATH="$1/coding/bin:$PATH" npm ci --prefix "$1/npm" --no-audit --no-fund --loglevel=error

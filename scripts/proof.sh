#!/bin/sh
# Runs a campaign of faults, and puts what it found into docs/proof.md: scripts/proof.sh BINARY DURATION SEED
set -eu
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$1" prove --duration="$2" --seed="$3" --report="$dir"
scripts/proof-page.sh "$dir"

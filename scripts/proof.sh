#!/bin/sh
# Runs a campaign of faults, and puts what it found into docs/proof.md: scripts/proof.sh BINARY DURATION SEED
set -eu
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
if ! "$1" prove --duration="$2" --seed="$3" --report="$dir"; then
	trap - EXIT # the report says what went wrong
	exit 1
fi
scripts/proof-page.sh "$dir"

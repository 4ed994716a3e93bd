#!/usr/bin/env bash
# Measures a commit and the working tree with posthaste bench, in turns, and compares them with benchstat.
#
#   scripts/bench-compare.sh BASE ROUNDS [drain|latency|idle|orders [flags]]
#
# It leaves nothing in the repository, also after Ctrl-C.
set -euo pipefail
cd "$(dirname "$0")/.."

base=${1:?name the commit to compare the working tree with: make bench-compare BASE=main}
rounds=${2:-10}
shift 2
[ $# -gt 0 ] || set -- drain
git rev-parse --verify --quiet --end-of-options "$base^{commit}" >/dev/null || {
	echo "bench-compare: there is no commit $base in this repository" >&2
	exit 1
}

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/source"
git archive "$base" | tar -x -C "$dir/source"
echo "building $base and the working tree" >&2
(cd "$dir/source" && CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$dir/base" ./cmd/posthaste)
CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$dir/new" ./cmd/posthaste
go build -o "$dir/benchlines" ./internal/bench/benchlines

# In every other round the base runs second, so that a change of the machine affects both.
for round in $(seq "$rounds"); do
	order="base new"
	[ $((round % 2)) = 1 ] || order="new base"
	for version in $order; do
		echo "round $round of $rounds: $version" >&2
		"$dir/$version" bench "$1" --json --runs=1 "${@:2}" | "$dir/benchlines" >>"$dir/$version.txt"
	done
done
cd "$dir"
go run golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da base.txt new.txt

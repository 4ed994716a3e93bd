#!/usr/bin/env bash
# Measures a commit and the working tree with posthaste bench, in turns, and compares them with benchstat.
#
#   scripts/bench-compare.sh BASE ROUNDS [drain|latency|orders [flags]]
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

# A row of the report as Go's benchmarks write it, which benchstat reads. The unit of a figure is its name.
lines='import json, re, sys
report = json.load(sys.stdin)
for kind in "Limit", "Result":
    for row in report[kind.lower() + "s"]:
        figures = ("%g %s" % (f["median"], name) for name, f in sorted(row["figures"].items()))
        print("Benchmark" + kind + "/" + re.sub(r"[^\w./=]+", "-", row["name"], flags=re.A), 1, *figures)'

# In every other round the base runs second, so that a change of the machine affects both.
for round in $(seq "$rounds"); do
	order="base new"
	[ $((round % 2)) = 1 ] || order="new base"
	for version in $order; do
		echo "round $round of $rounds: $version" >&2
		"$dir/$version" bench "$1" --json --runs=1 "${@:2}" | python3 -c "$lines" >>"$dir/$version.txt"
	done
done
cd "$dir"
go run golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da base.txt new.txt

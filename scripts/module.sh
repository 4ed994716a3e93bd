#!/usr/bin/env bash
# Renames the module in all files: go.mod, imports, the linter's rules, documents.
# Usage: scripts/module.sh example.org/you/posthaste
set -euo pipefail
cd "$(dirname "$0")/.."

new=${1:-}
if ! [[ $new =~ ^[a-z0-9-]+(\.[a-z0-9-]+)+(/[A-Za-z0-9._~-]+)+$ ]]; then
	echo "usage: make module MODULE=example.org/you/posthaste" >&2
	exit 2
fi
old=$(sed -n 's/^module //p' go.mod)
folders=$(find . -mindepth 2 -name '*.go' -not -path '*/node_modules/*' | cut -d/ -f2 | sort -u | paste -sd'|')
export old new folders
find . -type f \( -name '*.go' -o -name go.mod -o -name Makefile -o -name '*.md' -o -name '*.yml' -o -name '*.yaml' \
	-o -name '*.sh' \) -not -path './.git/*' -not -path './bin/*' -not -path './dist/*' -not -path '*/node_modules/*' \
	-not -path ./scripts/module.sh -print0 |
	xargs -0 perl -pi -e '
		s{(?<![\w./:-])\Q$ENV{old}\E(?=/(?:$ENV{folders})\b)}{$ENV{new}}g;
		s{"\Q$ENV{old}\E/"}{"$ENV{new}/"}g;
		s{(?<![\w./-])\Q$ENV{old}\E(?=\@v0|=\.\.)}{$ENV{new}}g;
		s{(?<![\w./-])\Q$ENV{old}\E(?![\w./-])}{$ENV{new}}g
			if $ARGV =~ m{/go\.mod$|/\.golangci\.yml$} && !m{^//};
	'

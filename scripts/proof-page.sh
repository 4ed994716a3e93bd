#!/bin/sh
# Puts the report of a campaign into docs/proof.md: scripts/proof-page.sh FOLDER
set -eu
cd "$(dirname "$0")/.."
install -m 644 "$1/timeline.svg" docs/img/proof.svg
{
	sed '/^<!-- result:/q' docs/proof.md
	echo
	# Without its heading and tables, but with the names of the faults; the picture is elsewhere.
	sed -e 1,2d -e '/^|/d' -e 's,(timeline.svg),(img/proof.svg),' "$1/report.md" | cat -s
	echo
	sed -n 's/^| \(`[a-z-]*`\) |.*/\1,/p' "$1/report.md" | tr '\n' ' ' | sed 's/^/The faults: /; s/, $/./' | fmt -w 120
	echo
	sed -n '/^<!-- end of result -->/,$p' docs/proof.md
} >"$1/proof.md"
install -m 644 "$1/proof.md" docs/proof.md

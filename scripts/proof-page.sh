#!/bin/sh
# Puts the report of a campaign into docs/proof.md: scripts/proof-page.sh FOLDER
set -eu
cd "$(dirname "$0")/.."
install -m 644 "$1/timeline.svg" docs/img/proof.svg
{
	sed '/^<!-- result:/q' docs/proof.md
	echo
	# Without its heading; the picture is elsewhere.
	sed -e 1,2d -e 's,(timeline.svg),(img/proof.svg),' "$1/report.md"
	echo
	sed -n '/^<!-- end of result -->/,$p' docs/proof.md
} >"$1/proof.md"
install -m 644 "$1/proof.md" docs/proof.md

#!/usr/bin/env bash
# Makes sure that the named server programs are there: postgres, redis, promtool.
#
# Nothing is touched when they are. What is missing is installed from the distribution when this runs as root on
# Debian or Ubuntu; otherwise the exact command is printed and the script ends with 1. Installing starts no service:
# the demo and the tests run servers of their own, on free ports.
set -euo pipefail

have() {
	case $1 in
	postgres)
		# The same places, in the same order, as the demo looks in (internal/local).
		local dir
		if [ -n "${POSTHASTE_PG_BIN:-}" ]; then
			[ -x "$POSTHASTE_PG_BIN/initdb" ] && [ -x "$POSTHASTE_PG_BIN/postgres" ]
			return
		fi
		for dir in "$(pg_config --bindir 2>/dev/null || true)" /usr/lib/postgresql/*/bin "$(dirname "$(command -v postgres || echo /none)")"; do
			[ -x "$dir/initdb" ] && [ -x "$dir/postgres" ] && return 0
		done
		return 1
		;;
	redis) [ -n "${POSTHASTE_REDIS_BIN:-}" ] || command -v redis-server >/dev/null || command -v valkey-server >/dev/null ;;
	promtool) command -v promtool >/dev/null ;;
	*)
		echo "ensure.sh: unknown program: $1" >&2
		exit 2
		;;
	esac
}

package() {
	case $1 in
	postgres) echo postgresql ;;
	redis) echo redis-server ;;
	promtool) echo prometheus ;;
	esac
}

packages=()
for program in "$@"; do
	have "$program" || packages+=("$(package "$program")")
done
[ ${#packages[@]} -gt 0 ] || exit 0

install="apt-get install -y --no-install-recommends ${packages[*]}"
if ! command -v apt-get >/dev/null; then
	echo "missing: ${packages[*]} (Debian's names). Install them with your system's package manager, then run this again." >&2
	exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
	echo "missing: ${packages[*]}. Run this, then try again:" >&2
	echo "  sudo apt-get update && sudo $install" >&2
	exit 1
fi

# Debian starts a service as soon as its package is installed, unless this file says no. One that exists is obeyed.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
	trap 'rm -f $policy' EXIT
	printf '#!/bin/sh\nexit 101\n' >$policy
	chmod 755 $policy
fi
echo "installing ${packages[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
# The package list of a fresh image is empty or old: refresh it only if the first try finds nothing.
$install </dev/null >/dev/null 2>&1 || { apt-get update -q </dev/null >&2 && $install </dev/null >&2; }

for program in "$@"; do
	have "$program" || {
		echo "installed ${packages[*]}, but $program is still not found" >&2
		exit 1
	}
done

#!/usr/bin/env bash
# Ensures that the named programs are installed: postgres, redis, valkey, pgbouncer, prometheus (with promtool), cc
# (for the race detector), chromium, node (18 or later, with npm).
#
# If they are, the script changes nothing. As root on Debian or Ubuntu, it installs missing programs from the
# distribution; otherwise it prints the exact command and exits with 1. Installing starts no service: the demo and the
# tests run their own servers, on free ports.
set -euo pipefail

postgres_found() {
	# The same places where the demo and the tests look (internal/lab/local).
	local dir
	for dir in "${POSTHASTE_PG_BIN:-}" "${POSTHASTE_TEST_PG_BIN:-}" "$(pg_config --bindir 2>/dev/null || true)" \
		/usr/lib/postgresql/*/bin "$(dirname "$(command -v postgres || echo /none)")"; do
		[ -x "$dir/initdb" ] && [ -x "$dir/postgres" ] && return 0
	done
	return 1
}

have() {
	case $1 in
	postgres) postgres_found ;;
	redis) command -v "${POSTHASTE_REDIS_BIN:-redis-server}" >/dev/null || command -v valkey-server >/dev/null ;;
	valkey) command -v "${POSTHASTE_TEST_VALKEY_BIN:-valkey-server}" >/dev/null ;;
	pgbouncer) PATH=$PATH:/usr/sbin command -v pgbouncer >/dev/null ;;
	prometheus) command -v prometheus >/dev/null && command -v promtool >/dev/null ;;
	cc) command -v "${CC:-gcc}" >/dev/null ;;
	chromium) command -v "${POSTHASTE_TEST_CHROMIUM:-chromium}" >/dev/null ;;
	node) command -v node >/dev/null && command -v npm >/dev/null ;;
	python) /usr/bin/python3 -c 'import psycopg2, redis' 2>/dev/null ;;
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
	valkey) echo valkey-server ;;
	pgbouncer) echo pgbouncer ;;
	prometheus) echo prometheus ;;
	cc) echo gcc libc6-dev ;;
	chromium) echo chromium fonts-dejavu-core ;; # without a font there is no text
	node) echo nodejs npm ;;
	python) echo python3 python3-psycopg2 python3-redis ;;
	esac
}

# backports prints the apt source of this Debian release's backports, on the mirror that apt uses already.
backports() {
	local codename uri key
	codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
	uri=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 2>/dev/null | awk -v c="$codename" '$2 == c { print $1; exit }')
	key=/usr/share/keyrings/debian-archive-keyring.gpg
	[ -n "$uri" ] && [ -e $key ] || return 1
	echo "deb [signed-by=$key] $uri $codename-backports main"
}

# Debian 12 has valkey in its backports only. The source is removed when this script ends.
with_backports() {
	local list=/etc/apt/sources.list.d/posthaste-backports.list
	apt-cache show valkey-server >/dev/null 2>&1 && return
	undo+=("$list")
	backports >$list || return 0
	apt-get update -q </dev/null >&2
}

packages=()
for program in "$@"; do
	have "$program" || read -ra packages <<<"${packages[*]:-} $(package "$program")"
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
	case " ${packages[*]} " in *" valkey-server "*)
		apt-cache show valkey-server >/dev/null 2>&1 ||
			echo "valkey-server is in Debian 12's backports: add that source first, or name a binary in POSTHASTE_TEST_VALKEY_BIN." >&2
		;;
	esac
	exit 1
fi

undo=()
trap '[ ${#undo[@]} -eq 0 ] || rm -f "${undo[@]}"' EXIT
# Debian starts a service as soon as its package is installed, unless this file forbids it. An existing file is kept.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
	undo+=($policy)
	printf '#!/bin/sh\nexit 101\n' >$policy
	chmod 755 $policy
fi
echo "installing ${packages[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
# The package list of a fresh image is empty or old: refresh it only if the first try finds nothing.
if ! $install </dev/null >/dev/null 2>&1; then
	apt-get update -q </dev/null >&2
	case " ${packages[*]} " in *" valkey-server "*) with_backports ;; esac
	$install </dev/null >&2
fi

for program in "$@"; do
	have "$program" || {
		echo "installed ${packages[*]}, but $program is still not found" >&2
		exit 1
	}
done

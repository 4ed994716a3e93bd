#!/bin/sh
# Installs the servers that the tests start: Postgres, Redis, Valkey (which has WAITAOF), and Prometheus. Does nothing,
# quickly, when they are there. Needs apt; elsewhere it says what to install.
set -eu

missing=''
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null 2>&1 || missing="$missing postgresql"
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
command -v valkey-server >/dev/null 2>&1 || missing="$missing valkey-server"
command -v prometheus >/dev/null 2>&1 || missing="$missing prometheus"
[ -n "$missing" ] || exit 0
missing=${missing# }

if ! command -v apt-get >/dev/null 2>&1; then
	echo "missing: $missing; install them with this system's package manager" >&2
	exit 1
fi
if [ "$(id -u)" != 0 ]; then
	echo "missing: $missing; run: sudo sh $0" >&2
	exit 1
fi

# Debian 12 has Valkey in its backports only. The entry is made of the machine's own: same mirror, same key.
add_backports() {
	. /etc/os-release
	[ "${ID:-}" = debian ] && [ "${VERSION_CODENAME:-}" = bookworm ] || return 0
	! grep -rqs "$VERSION_CODENAME-backports" /etc/apt/sources.list /etc/apt/sources.list.d || return 0
	mirror=$(apt-get indextargets --format '$(CREATED_BY) $(RELEASE) $(REPO_URI)' |
		awk -v r="$VERSION_CODENAME" '$1 == "Packages" && $2 ~ "^" r { print $3; exit }')
	[ -n "$mirror" ] || return 0 # apt then says that there is no such package
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror%/} $VERSION_CODENAME-backports main" \
		>/etc/apt/sources.list.d/posthaste-backports.list
}

export DEBIAN_FRONTEND=noninteractive
case " $missing " in *" valkey-server "*) add_backports ;; esac
apt-get update -q
# The tests start servers of their own; the packages must not start theirs. (Left alone where the machine has a policy.)
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod +x "$policy"
	trap 'rm -f "$policy"' EXIT
fi
# shellcheck disable=SC2086 # a list of words
apt-get install -q -y --no-install-recommends $missing

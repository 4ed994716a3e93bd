#!/usr/bin/env bash
# Builds the files of a release into a folder: archives for each platform, packages and an image for Linux, checksums,
# and an SBOM for each binary. Publishes nothing.
# Usage: scripts/release.sh FOLDER [OS/ARCH…]
# VERSION is that of git by default. SBOM=off leaves the SBOMs out.
set -euo pipefail
cd "$(dirname "$0")/.."

nfpm=github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.4
cyclonedx=github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0

mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64 windows/arm64
VERSION=${VERSION:-$(git describe --tags --dirty 2>/dev/null || echo "v0.0.0-$(git describe --always --dirty)")}
# The files get the time of the commit, so that a build can be repeated.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export VERSION SOURCE_DATE_EPOCH
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT

GOBIN=$tools go install "$nfpm"
[ "${SBOM:-on}" = off ] || GOBIN=$tools go install "$cyclonedx"

# What every platform has: completions and the manual page, which the program writes itself.
make --no-print-directory build BINARY="$tools/posthaste" VERSION="$VERSION"
share=$tools/share
mkdir -p "$share/completion"
for shell in bash zsh fish; do
	"$tools/posthaste" completion "$shell" >"$share/completion/posthaste.$shell"
done
"$tools/posthaste" gen-docs --man "$share"
cp LICENSE README.md CHANGELOG.md scripts/roles.sql "$share"

programs=()
for platform; do
	export GOOS=${platform%/*} GOARCH=${platform#*/}
	name=posthaste_${VERSION#v}_${GOOS}_$GOARCH
	stage=$tools/$name
	cp -r "$share" "$stage"
	binary=posthaste
	[ "$GOOS" != windows ] || binary=posthaste.exe
	[ "$GOOS" != linux ] || cp -r deploy/systemd "$stage"
	make --no-print-directory build BINARY="$stage/$binary" VERSION="$VERSION"
	find "$stage" -exec touch -d "@$SOURCE_DATE_EPOCH" {} +
	if [ "$GOOS" = windows ]; then
		(cd "$tools" && GOOS='' GOARCH='' python3 -m zipfile -c "$out/$name.zip" "$name")
	else
		tar -C "$tools" --sort=name --owner=0 --group=0 --numeric-owner -c "$name" | gzip -n >"$out/$name.tar.gz"
	fi
	if [ "$GOOS" = linux ]; then
		programs+=("$platform=$stage/$binary")
		for packager in deb rpm; do
			(cd "$stage" && "$tools/nfpm" package -f "$OLDPWD/deploy/nfpm.yaml" -p $packager -t "$out")
		done
	fi
	[ "${SBOM:-on}" = off ] || "$tools/cyclonedx-gomod" bin -json -output "$out/$name.cdx.json" "$stage/$binary"
done
if [ ${#programs[@]} -gt 0 ]; then
	# An OCI layout, for: skopeo copy oci-archive:FILE docker://…
	GOOS='' GOARCH='' go -C lab run ./image "$tools/image" "$VERSION" "${programs[@]}"
	tar -C "$tools/image" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
		-cf "$out/posthaste_${VERSION#v}_image.tar" .
fi
cd "$out"
find . -maxdepth 1 -type f ! -name checksums.txt -printf '%f\n' | sort | xargs sha256sum >checksums.txt

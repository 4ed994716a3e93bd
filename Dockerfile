# syntax=docker/dockerfile:1.7

# By tag: a release pins both to what they are then (.github/workflows/release.yml).
ARG BUILD=golang:1.26-bookworm
ARG BASE=gcr.io/distroless/static-debian12:nonroot

# On the builder's own architecture, for any.
FROM --platform=$BUILDPLATFORM ${BUILD} AS build
WORKDIR /src
# Modules first: this layer is rebuilt only when they change.
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
ARG VERSION=dev
ARG TARGETOS
ARG TARGETARCH
# The same line as in the Makefile; a test compares the two.
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    GOOS=$TARGETOS GOARCH=$TARGETARCH \
    CGO_ENABLED=0 go build -trimpath -buildvcs=false -tags=nomsgpack -ldflags="-s -w -X main.version=${VERSION}" -o /out/posthaste ./cmd/posthaste

# No shell, no package manager: the binary, CA certificates, time zones.
FROM ${BASE}
ARG VERSION=dev
LABEL org.opencontainers.image.title="posthaste" \
      org.opencontainers.image.description="Transactional outbox: Postgres to Redis Streams" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /out/posthaste /posthaste
USER 65532:65532
# 8080 the public API; 9090, 9091 and 9093 the admin listeners of API, relay and consumer in docker-compose.yml.
EXPOSE 8080 9090 9091 9093
ENTRYPOINT ["/posthaste"]
CMD ["--help"]

// Command image writes a container image as an OCI layout, without a container engine: the program, the certificates
// of this machine's CAs, and the settings of the Dockerfile.
//
//	image FOLDER VERSION OS/ARCH=PROGRAM…
package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const certificates = "etc/ssl/certs/ca-certificates.crt"

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "usage: image FOLDER VERSION OS/ARCH=PROGRAM…")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

// write makes an image for each platform, with the time of SOURCE_DATE_EPOCH, and writes their layout into dir.
func write(dir, version string, platforms []string) error {
	epoch, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	at := time.Unix(epoch, 0).UTC()
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range platforms {
		name, program, _ := strings.Cut(p, "=")
		system, arch, _ := strings.Cut(name, "/")
		platform := v1.Platform{OS: system, Architecture: arch}
		img, err := image(program, version, platform, at)
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		add := mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &platform}}
		index = mutate.AppendManifests(index, add)
	}
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	ref := layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": version})
	return path.AppendIndex(index, ref)
}

func image(program, version string, p v1.Platform, at time.Time) (v1.Image, error) {
	var files bytes.Buffer
	t := tar.NewWriter(&files)
	for _, f := range []struct {
		from, to string
		mode     int64
	}{{program, "posthaste", 0o755}, {"/" + certificates, certificates, 0o644}} {
		b, err := os.ReadFile(f.from)
		if err != nil {
			return nil, err
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: f.to, Mode: f.mode, Size: int64(len(b)), ModTime: at}
		if err := t.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := t.Write(b); err != nil {
			return nil, err
		}
	}
	if err := t.Close(); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(files.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return nil, err
	}
	c, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	c = c.DeepCopy()
	c.OS, c.Architecture, c.Created = p.OS, p.Architecture, v1.Time{Time: at}
	c.Config = v1.Config{
		User: "65532:65532", Entrypoint: []string{"/posthaste"}, Cmd: []string{"--help"},
		ExposedPorts: map[string]struct{}{"8080": {}, "9090": {}, "9091": {}, "9093": {}},
		Labels: map[string]string{
			"org.opencontainers.image.title":       "posthaste",
			"org.opencontainers.image.description": "Transactional outbox: Postgres to Redis Streams",
			"org.opencontainers.image.licenses":    "Apache-2.0",
			"org.opencontainers.image.version":     version,
		},
	}
	return mutate.ConfigFile(img, c)
}

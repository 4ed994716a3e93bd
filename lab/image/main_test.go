package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// The layout is valid, has an image for each platform with the program and the Dockerfile's settings, and a second run
// gives the same bytes.
func TestImage(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	must(t, os.WriteFile(program, []byte("the program"), 0o600))
	indexes := make([]string, 2)
	for i := range indexes {
		to := filepath.Join(dir, strconv.Itoa(i))
		must(t, write(to, "v1.2.3", []string{"linux/amd64=" + program, "linux/arm64=" + program}))
		b, err := os.ReadFile(filepath.Join(to, "index.json"))
		must(t, err)
		indexes[i] = string(b)
	}
	if indexes[0] != indexes[1] {
		t.Errorf("two runs give different images: %s, %s", indexes[0], indexes[1])
	}
	all, err := layout.ImageIndexFromPath(filepath.Join(dir, "0"))
	must(t, err)
	must(t, validate.Index(all))
	top, err := all.IndexManifest()
	must(t, err)
	index, err := all.ImageIndex(top.Manifests[0].Digest)
	must(t, err)
	m, err := index.IndexManifest()
	must(t, err)
	var platforms []string
	for _, d := range m.Manifests {
		img, err := index.Image(d.Digest)
		must(t, err)
		c, err := img.ConfigFile()
		must(t, err)
		platforms = append(platforms, c.OS+"/"+c.Architecture)
		if want := dockerfile(t); !reflect.DeepEqual(c.Config, want) {
			t.Errorf("the configuration is %+v, that of the Dockerfile %+v", c.Config, want)
		}
		if names := list(t, img); !slices.Equal(names, []string{"posthaste", certificates}) {
			t.Errorf("the files are %q", names)
		}
	}
	if !slices.Equal(platforms, []string{"linux/amd64", "linux/arm64"}) {
		t.Errorf("the platforms are %q", platforms)
	}
}

// dockerfile returns the configuration that the Dockerfile gives to version 1.2.3.
func dockerfile(t *testing.T) v1.Config {
	t.Helper()
	b, err := os.ReadFile("../../Dockerfile")
	must(t, err)
	r, err := parser.Parse(strings.NewReader(strings.ReplaceAll(string(b), "${VERSION}", "v1.2.3")))
	must(t, err)
	c := v1.Config{ExposedPorts: map[string]struct{}{}, Labels: map[string]string{}}
	for _, n := range r.AST.Children {
		var words []string
		for w := n.Next; w != nil; w = w.Next {
			words = append(words, w.Value)
		}
		switch strings.ToUpper(n.Value) {
		case "USER":
			c.User = words[0]
		case "ENTRYPOINT":
			c.Entrypoint = words
		case "CMD":
			c.Cmd = words
		case "EXPOSE":
			for _, port := range words {
				c.ExposedPorts[port] = struct{}{}
			}
		case "LABEL":
			for i := 0; i+1 < len(words); i += 3 { // name, value, "="
				c.Labels[words[i]] = strings.Trim(words[i+1], `"`)
			}
		}
	}
	return c
}

func list(t *testing.T, img v1.Image) (names []string) {
	t.Helper()
	files := mutate.Extract(img)
	defer files.Close()
	cmd := exec.CommandContext(t.Context(), "tar", "-t")
	cmd.Stdin = files
	out, err := cmd.Output()
	must(t, err)
	return strings.Fields(string(out))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

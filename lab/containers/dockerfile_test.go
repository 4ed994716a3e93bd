package containers_test

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// instructions returns the Dockerfile's instructions, each as its words.
func instructions(tb testing.TB) [][]string {
	tb.Helper()
	r, err := parser.Parse(strings.NewReader(read(tb, "Dockerfile")))
	if err != nil {
		tb.Fatalf("Dockerfile: %v", err)
	}
	if len(r.Warnings) > 0 {
		tb.Errorf("Dockerfile: warnings: %v", r.Warnings)
	}
	var all [][]string
	for _, n := range r.AST.Children {
		words := append([]string{strings.ToUpper(n.Value)}, n.Flags...)
		for w := n.Next; w != nil; w = w.Next {
			words = append(words, w.Value)
		}
		all = append(all, words)
	}
	return all
}

func TestDockerfile(t *testing.T) {
	t.Parallel()
	all := instructions(t)
	var from []string
	images := map[string]string{} // by the argument with which a release pins them
	for _, words := range all {
		switch words[0] {
		case "FROM":
			words = slices.DeleteFunc(words, func(w string) bool { return strings.HasPrefix(w, "--") })
			from = append(from, images[strings.Trim(words[1], "${}")])
		case "ARG":
			if name, image, ok := strings.Cut(words[1], "="); ok && len(from) == 0 {
				images[name] = image
			}
		case "CMD", "COPY", "ENTRYPOINT", "EXPOSE", "LABEL", "RUN", "USER", "WORKDIR": // package image compares most
		default:
			// ADD too: it fetches and unpacks by itself.
			t.Errorf("unknown or unwanted instruction: %v", words)
		}
	}
	if want := []string{"golang:1.26-bookworm", "gcr.io/distroless/static-debian12:nonroot"}; !slices.Equal(from,
		want) {
		t.Errorf("stages: got %v, want %v", from, want)
	}
}

var goBuild = regexp.MustCompile(`CGO_ENABLED=0 (?:go|\$\(GO\)) build (.*?) ?-ldflags=`)

// TestDockerfileBuildLine: the image holds the same binary as make build makes, for the same linker flags and go.mod.
func TestDockerfileBuildLine(t *testing.T) {
	t.Parallel()
	docker, local := read(t, "Dockerfile"), read(t, "Makefile")
	d, m := goBuild.FindStringSubmatch(docker), goBuild.FindStringSubmatch(local)
	if d == nil || m == nil || d[1] != m[1] {
		t.Errorf("go build: Dockerfile %q, Makefile %q", d, m)
	}
	if !strings.Contains(docker, `-ldflags="-s -w -X main.version=${VERSION}"`) ||
		!strings.Contains(local, `LDFLAGS  := -s -w -X main.version=$(VERSION)`) {
		t.Error("the linker flags differ")
	}
	if !strings.Contains(read(t, "go.mod"), "\ngo 1.26") {
		t.Error("the Dockerfile's Go is not that of go.mod")
	}
}

// TestDockerIgnore: no package is left out of the build context.
func TestDockerIgnore(t *testing.T) {
	t.Parallel()
	ignored := map[string]bool{}
	for line := range strings.Lines(read(t, ".dockerignore")) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			if line == "**/node_modules" {
				continue // what the browser tests fetch; no package of ours is ever called that
			}
			if strings.ContainsAny(line, "*/!") {
				t.Errorf("%q: only plain names at the top level, which this test can follow", line)
			}
			ignored[line] = true
		}
	}
	for _, must := range []string{".git", ".env", "bin"} {
		if !ignored[must] {
			t.Errorf("%s goes into the build context", must)
		}
	}
	root, err := filepath.Abs(".")
	must(t, err)
	// Every package with code, which is more than the binary needs; folders of tests alone may be left out.
	out, err := exec.CommandContext(t.Context(), "go", "list", "-f", "{{if .GoFiles}}{{.Dir}}{{end}}", "./...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for dir := range strings.Lines(string(out)) {
		rel, err := filepath.Rel(root, strings.TrimSpace(dir))
		must(t, err)
		if top, _, _ := strings.Cut(rel, string(filepath.Separator)); ignored[top] {
			t.Errorf("the binary needs %s, which .dockerignore leaves out", rel)
		}
	}
}

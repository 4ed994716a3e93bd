package deploy

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rhysd/actionlint"
	"sigs.k8s.io/yaml"
)

// read into what is looked at here; goreleaser itself refuses what it does not know.
type release struct {
	Builds []struct {
		Main, Binary                      string
		Env, Goos, Goarch, Flags, Ldflags []string
	}
	Archives []struct{ Files []string }
}

func goreleaser(t *testing.T) release {
	t.Helper()
	var r release
	must(t, yaml.Unmarshal([]byte(file(t, "../.goreleaser.yaml")), &r))
	if len(r.Builds) != 1 || len(r.Archives) != 1 {
		t.Fatalf("%d builds and %d archives, want one of each", len(r.Builds), len(r.Archives))
	}
	return r
}

var buildLine = regexp.MustCompile(`(?m)^BUILD    := (CGO_ENABLED=0) \$\(GO\) build (.*) -ldflags='\$\(LDFLAGS\)'$`)

// TestReleaseIsWhatMakeBuilds: a release has the same binary as make build, for four platforms.
func TestReleaseIsWhatMakeBuilds(t *testing.T) {
	t.Parallel()
	makefile, b := file(t, "../Makefile"), goreleaser(t).Builds[0]
	line := buildLine.FindStringSubmatch(makefile)
	if line == nil || !slices.Equal(b.Env, line[1:2]) || !slices.Equal(b.Flags, strings.Fields(line[2])) {
		t.Errorf("make build has %q, a release %q and %q", line, b.Env, b.Flags)
	}
	if want := []string{"-s -w -X main.version=v{{ .Version }}"}; !slices.Equal(b.Ldflags, want) ||
		!strings.Contains(makefile, "LDFLAGS  := -s -w -X main.version=$(VERSION)\n") {
		t.Errorf("the linker's flags are %q, or make build has others", b.Ldflags)
	}
	if !slices.Equal(b.Goos, []string{"linux", "darwin"}) || !slices.Equal(b.Goarch, []string{"amd64", "arm64"}) ||
		b.Main != "./cmd/posthaste" || b.Binary != "posthaste" {
		t.Errorf("built: %+v", b)
	}
}

func TestReleaseFilesExist(t *testing.T) {
	t.Parallel()
	for _, pattern := range goreleaser(t).Archives[0].Files {
		if found, err := filepath.Glob("../" + pattern); err != nil || len(found) == 0 {
			t.Errorf("archives have %s, which is not there, %v", pattern, err)
		}
	}
}

func workflow(t *testing.T, name string) *actionlint.Workflow {
	t.Helper()
	w, faults := actionlint.Parse([]byte(file(t, "../.github/workflows/"+name)))
	if len(faults) > 0 {
		t.Fatalf("%s: %v", name, faults)
	}
	return w
}

// scripts are the shell commands of a workflow's job.
func scripts(t *testing.T, name, job string) []string {
	t.Helper()
	j, ok := workflow(t, name).Jobs[job]
	if !ok {
		t.Fatalf("%s has no job %s", name, job)
	}
	var all []string
	for _, s := range j.Steps {
		if run, ok := s.Exec.(*actionlint.ExecRun); ok {
			all = append(all, run.Run.Value)
		}
	}
	return all
}

var target = regexp.MustCompile(`(?m)^\s*make ([a-z/-]+)`)

// TestWorkflows: actionlint finds nothing, CI runs .ci/run, nothing is released before that has passed, and what the
// workflows make, the Makefile has.
func TestWorkflows(t *testing.T) {
	t.Parallel()
	linter, err := actionlint.NewLinter(io.Discard, &actionlint.LinterOptions{})
	must(t, err)
	names, err := filepath.Glob("../.github/workflows/*.yml")
	if err != nil || len(names) != 2 {
		t.Fatalf("workflows: %v, %v", names, err)
	}
	faults, err := linter.LintFiles(names, nil)
	must(t, err)
	for _, f := range faults {
		t.Error(f)
	}
	if !slices.Contains(scripts(t, "ci.yml", "all"), ".ci/run") {
		t.Error("CI does not run .ci/run")
	}
	makefile := strings.ReplaceAll(file(t, "../Makefile"), "$(RELEASER)", "bin/tools/goreleaser")
	for _, name := range []string{"ci.yml", "release.yml"} {
		for job, j := range workflow(t, name).Jobs { // by id, in lower case
			if len(j.Steps) == 0 {
				continue
			}
			for _, m := range target.FindAllStringSubmatch(strings.Join(scripts(t, name, job), "\n"), -1) {
				if !strings.Contains(makefile, "\n"+m[1]+":") {
					t.Errorf("%s: the Makefile has no target %s", name, m[1])
				}
			}
		}
	}
	for _, job := range []string{"binaries", "image"} {
		var needs []string
		for _, n := range workflow(t, "release.yml").Jobs[job].Needs {
			needs = append(needs, n.Value)
		}
		if !slices.Equal(needs, []string{"test", "vulnerabilities"}) {
			t.Errorf("%s waits for %v", job, needs)
		}
	}
}

// TestReleaseNotes runs the script that cuts a version's section out of the changelog.
func TestReleaseNotes(t *testing.T) {
	t.Parallel()
	all := scripts(t, "release.yml", "binaries")
	i := slices.IndexFunc(all, func(s string) bool { return strings.Contains(s, "notes.md") })
	notes := func(tag, changelog string) (string, error) {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "CHANGELOG.md"), []byte(changelog), 0o600))
		cmd := exec.CommandContext(t.Context(), "bash", "-e", "-c", all[i])
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "RUNNER_TEMP="+dir, "GITHUB_REF_NAME="+tag)
		err := cmd.Run()
		return file(t, filepath.Join(dir, "notes.md")), err
	}
	const changelog = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.2.0] - 2027-01-02\n\n### Added\n\n- it\n\n" +
		"## [0.1.0] - 2026-12-01\n\n- all\n"
	if got, err := notes("v0.2.0", changelog); err != nil || got != "\n### Added\n\n- it\n\n" {
		t.Errorf("the notes of v0.2.0: %q, %v", got, err)
	}
	if got, err := notes("v0.3.0", changelog); err == nil {
		t.Errorf("a version that the changelog does not have is released with the notes %q", got)
	}
	if got, err := notes("v0.1.0", file(t, "../CHANGELOG.md")); err != nil || !strings.Contains(got, "### Added") {
		t.Errorf("CHANGELOG.md has no section for 0.1.0: %v", err)
	}
}

// TestImagesArePinned runs the script that looks up the base images' digests, with a docker that knows them.
func TestImagesArePinned(t *testing.T) {
	t.Parallel()
	all := scripts(t, "release.yml", "image")
	i := slices.IndexFunc(all, func(s string) bool { return strings.Contains(s, "imagetools") })
	dir := t.TempDir()
	const docker = "#!/bin/sh\ntest \"$1 $2 $3 $5\" = 'buildx imagetools inspect --format' && echo sha256:$4\n"
	must(t, os.WriteFile(filepath.Join(dir, "docker"), []byte(docker), 0o700))
	cmd := exec.CommandContext(t.Context(), "bash", "-e", "-c", all[i])
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "GITHUB_OUTPUT="+filepath.Join(dir, "out"),
		"GITHUB_REPOSITORY=Owner/Posthaste")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var want string
	for _, m := range baseImage.FindAllStringSubmatch(file(t, "../Dockerfile"), -1) {
		want += m[1] + "=" + m[2] + "@sha256:" + m[2] + "\n"
		if arg := m[1] + "=${{ steps.images.outputs." + m[1] + " }}"; !strings.Contains(
			file(t, "../.github/workflows/release.yml"), arg) {
			t.Errorf("the image is not built with %s", arg)
		}
	}
	want += "name=ghcr.io/owner/posthaste\n"
	if got := file(t, filepath.Join(dir, "out")); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

var baseImage = regexp.MustCompile(`(?m)^ARG (\w+)=(\S+:\S+)$`)

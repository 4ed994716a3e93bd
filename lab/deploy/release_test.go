package deploy

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/rhysd/actionlint"
)

// unpacked builds the release of this platform, and unpacks the deb into a folder. The second result is the folder with
// the release.
func unpacked(t *testing.T) (root, dist string) {
	t.Helper()
	dist, root = t.TempDir(), t.TempDir()
	cmd := exec.CommandContext(t.Context(), "../scripts/release.sh", dist, "linux/"+runtime.GOARCH)
	cmd.Env = append(os.Environ(), "VERSION=v1.2.3", "SOURCE_DATE_EPOCH=1700000000", "SBOM=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("release.sh: %v\n%s", err, out)
	}
	output(t, "dpkg-deb", "-x", filepath.Join(dist, "posthaste_1.2.3_"+runtime.GOARCH+".deb"), root)
	return root, dist
}

func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Errorf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// TestPackages builds the release of this platform, unpacks its deb and runs what is in it.
func TestPackages(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("dpkg-deb is not installed")
	}
	root, dist := unpacked(t)
	if out := output(t, root+"/usr/bin/posthaste", "version"); !strings.HasPrefix(out, "posthaste v1.2.3 (") {
		t.Errorf("version: %s", out)
	}
	for name := range units(t) {
		if file(t, root+"/usr/lib/systemd/system/"+name+".service") != file(t, "systemd/"+name+".service") {
			t.Errorf("%s is another unit", name)
		}
	}
	if info, err := os.Stat(root + "/etc/posthaste"); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the folder of secrets: %v, %v", info, err)
	}
	page := file(t, root+"/usr/share/man/man1/posthaste.1")
	for _, want := range []string{
		".TH POSTHASTE 1", "\n.SS posthaste dead list\n", "\n.B \\-\\-migrate\n", "POSTHASTE_WAL_BUDGET",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the manual page lacks %q", want)
		}
	}
	completed := output(t, "bash", "-c", `. "$1"; COMP_WORDS=(posthaste --schema=x dead re); COMP_CWORD=3; _posthaste
		echo "${COMPREPLY[*]}"; COMP_WORDS=(posthaste completion z); COMP_CWORD=2; _posthaste; echo "${COMPREPLY[*]}"`,
		"bash", root+"/usr/share/bash-completion/completions/posthaste")
	if completed != "retry\nzsh\n" {
		t.Errorf("completed: %q", completed)
	}
	for _, name := range []string{"/zsh/site-functions/_posthaste", "/fish/vendor_completions.d/posthaste.fish"} {
		if !strings.Contains(file(t, root+"/usr/share"+name), "/dead/list") {
			t.Errorf("%s has no commands", name)
		}
	}
	sums := file(t, dist+"/checksums.txt")
	for _, kind := range []string{".deb", ".rpm", ".tar.gz", "_image.tar"} {
		if found, err := filepath.Glob(dist + "/posthaste*1.2.3*" + kind); err != nil || len(found) != 1 ||
			!strings.Contains(sums, filepath.Base(found[0])+"\n") {
			t.Errorf("%s: %v, %v; checksums %s", kind, found, err, sums)
		}
	}
	rpm, err := filepath.Glob(dist + "/*.rpm")
	if err != nil || len(rpm) != 1 || !strings.HasPrefix(file(t, rpm[0]), "\xed\xab\xee\xdb") {
		t.Errorf("no rpm: %v, %v", rpm, err)
	}
}

// TestModuleIsRenamed renames the module in a copy and builds packages of it.
func TestModuleIsRenamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	output(t, "bash", "-c", `cd .. && git ls-files -co --exclude-standard |
		while read -r f; do [ ! -f "$f" ] || echo "$f"; done | tar -cf - -T - | tar -C "$1" -xf -`, "bash", dir)
	rename := dir + "/scripts/module.sh"
	if out, err := exec.CommandContext(t.Context(), rename, "posthaste").CombinedOutput(); err == nil {
		t.Errorf("a path without a host is accepted: %s", out)
	}
	output(t, rename, "example.org/you/posthaste")
	for _, args := range [][]string{
		{"-C", dir, "build", "./outbox", "./examples/emit"},
		{"-C", dir, "list", "-test", "-deps", "./..."},
		{"-C", dir + "/grafana", "list", "-test", "-deps", "./..."},
		{"-C", dir + "/lab", "list", "-test", "-deps", "./..."},
	} {
		if out := output(t, "go", args...); strings.Contains("\n"+out, "\nposthaste/") {
			t.Errorf("go %v has packages of the old module", args)
		}
	}
	if page := file(t, dir+"/README.md"); !strings.Contains(page, "go get example.org/you/posthaste/") {
		t.Error("the README has another path")
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
	makefile := file(t, "../Makefile")
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

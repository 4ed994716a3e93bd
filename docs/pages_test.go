// Package docs_test compares the pages with the code, and runs the commands in them.
package docs_test

import (
	"io/fs"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"posthaste/internal/lab/testenv"
)

// TestMain goes to the root of the repository, which all names are relative to.
func TestMain(m *testing.M) {
	if err := os.Chdir(".."); err != nil {
		panic(err)
	}
	os.Exit(testenv.Main(m))
}

// page is one Markdown file, its name relative to the root.
type page struct{ name, text string }

// pages are all pages for readers.
func pages(t *testing.T) []page {
	t.Helper()
	names, err := filepath.Glob("docs/*.md")
	must(t, err)
	list := make([]page, 0, len(names)+4)
	for _, n := range append([]string{"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}, names...) {
		list = append(list, page{n, read(t, n)})
	}
	return list
}

var (
	fencePattern    = regexp.MustCompile("(?ms)^[ \t]*```(\\w*)[^\n]*\n(.*?)^[ \t]*```")
	linkPattern     = regexp.MustCompile(`\[([^\]]*)\]\(([^)\s]+)\)`)
	inlinePattern   = regexp.MustCompile("`([^`\n]+)`")
	headingPattern  = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	testNamePattern = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w*`)
	testFuncPattern = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)[A-Z]\w*)\(`)
	filePattern     = regexp.MustCompile(`^[\w.-]+(?:/[\w.-]+)+\.(?:go|sql|ya?ml|sh|lua|md|json)$`)
	makePattern     = regexp.MustCompile(`^make ([a-z-]+)`)
	variablePattern = regexp.MustCompile(`\bPOSTHASTE_[A-Z_]+\b`)
)

// testNames matches complete names of tests: TestFull… is a family of names.
func (p page) testNames() []string {
	return testNamePattern.FindAllString(regexp.MustCompile(`\b\w+…`).ReplaceAllString(p.text, ""), -1)
}

// prose is a page without its fenced blocks.
func (p page) prose() string { return fencePattern.ReplaceAllString(p.text, "") }

// commands are the lines of the page's shell blocks and its inline code, without comments, prompts and redirections.
func (p page) commands() []string {
	var lines []string
	for _, m := range fencePattern.FindAllStringSubmatch(p.text, -1) {
		if m[1] == "sh" || m[1] == "console" || m[1] == "" {
			lines = append(lines, strings.Split(strings.ReplaceAll(m[2], "\\\n", ""), "\n")...)
		}
	}
	for _, m := range inlinePattern.FindAllStringSubmatch(p.prose(), -1) {
		lines = append(lines, m[1])
	}
	for i, l := range lines {
		l = strings.TrimPrefix(strings.TrimSpace(l), "$ ")
		for _, end := range []string{" #", " |", " >", " 2>"} {
			l, _, _ = strings.Cut(l, end)
		}
		lines[i] = strings.TrimSpace(l)
	}
	return lines
}

func TestDocsLinks(t *testing.T) {
	t.Parallel()
	for _, p := range pages(t) {
		for _, m := range linkPattern.FindAllStringSubmatch(p.prose(), -1) {
			u, err := url.Parse(m[2])
			if err != nil {
				t.Errorf("%s: link %q: %v", p.name, m[2], err)
				continue
			}
			if testNamePattern.MatchString(m[1]) && p.name != "docs/semantics.md" && p.name != "docs/proof.md" {
				t.Errorf("%s: link the test %s in docs/semantics.md", p.name, m[1])
			}
			if u.IsAbs() {
				continue
			}
			target := p.name
			if u.Path != "" {
				target = filepath.Join(filepath.Dir(p.name), u.Path)
			}
			info, err := os.Stat(target)
			switch {
			case err != nil:
				t.Errorf("%s: link to %s, which is not there", p.name, m[2])
			case info.IsDir() && (u.Fragment != "" || testNamePattern.MatchString(m[1])):
				t.Errorf("%s: link to %s wants a file, not a folder", p.name, m[2])
			case u.Fragment != "" && !slices.Contains(anchors(read(t, target)), u.Fragment):
				t.Errorf("%s: link to %s: no such heading", p.name, m[2])
			case testNamePattern.MatchString(m[1]) && !strings.Contains(read(t, target), "\nfunc "+m[1]+"("):
				t.Errorf("%s: test %s is not in %s", p.name, m[1], target)
			}
		}
		for _, m := range inlinePattern.FindAllStringSubmatch(p.prose(), -1) {
			if filePattern.MatchString(m[1]) && missing(m[1]) && missing(filepath.Join(filepath.Dir(p.name), m[1])) {
				t.Errorf("%s names %s, which is not there", p.name, m[1])
			}
		}
	}
}

func missing(name string) bool {
	_, err := os.Stat(name)
	return err != nil
}

// anchors are the fragments of a page's headings, as GitHub generates them.
func anchors(text string) []string {
	drop := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	var list []string
	for _, m := range headingPattern.FindAllStringSubmatch(fencePattern.ReplaceAllString(text, ""), -1) {
		list = append(list, strings.ReplaceAll(drop.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return list
}

// TestDocsNames looks for every test and every variable that a page names.
func TestDocsNames(t *testing.T) {
	t.Parallel()
	tests, variables := map[string]bool{}, map[string]bool{}
	eachFile(t, func(name, text string) {
		for _, m := range testFuncPattern.FindAllStringSubmatch(text, -1) {
			tests[m[1]] = true
		}
		for _, v := range variablePattern.FindAllString(text, -1) {
			variables[v] = true
		}
	})
	// The settings' variables follow from their flags; make check compares this page with the flags.
	for _, v := range variablePattern.FindAllString(read(t, "docs/configuration.md"), -1) {
		variables[v] = true
	}
	for _, p := range pages(t) {
		for _, n := range p.testNames() {
			if !tests[n] {
				t.Errorf("%s names test %s, which does not exist", p.name, n)
			}
		}
		for _, v := range variablePattern.FindAllString(p.text, -1) {
			if !variables[v] {
				t.Errorf("%s names variable %s, which nothing reads", p.name, v)
			}
		}
	}
}

// TestVersionsScriptNamesTests: a name that matches no test would run nothing, and pass.
func TestVersionsScriptNamesTests(t *testing.T) {
	t.Parallel()
	tests := map[string]bool{}
	eachFile(t, func(name, text string) {
		for _, m := range testFuncPattern.FindAllStringSubmatch(text, -1) {
			tests[m[1]] = tests[m[1]] || strings.HasPrefix(name, "cmd/posthaste/")
		}
	})
	n := 0
	for line := range strings.Lines(read(t, "scripts/test-versions.sh")) {
		if !regexp.MustCompile(`^(relay|of_\w+)\+?=`).MatchString(line) {
			continue
		}
		for _, name := range regexp.MustCompile(`\b[A-Z]\w+`).FindAllString(line, -1) {
			if n++; !tests["Test"+name] {
				t.Errorf("cmd/posthaste has no test %s", "Test"+name)
			}
		}
	}
	if n < 10 {
		t.Errorf("only %d tests are named", n)
	}
}

// eachFile visits everything that is not documentation, and not this file.
func eachFile(t *testing.T, visit func(name, text string)) {
	t.Helper()
	kinds := []string{".go", ".sql", ".sh", ".yml", "Makefile"}
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "bin" || d.Name() == ".git"):
			return filepath.SkipDir
		case d.IsDir() || name == "docs/pages_test.go":
			return nil
		}
		if slices.ContainsFunc(kinds, func(k string) bool { return strings.HasSuffix(name, k) }) {
			visit(name, read(t, name))
		}
		return nil
	})
	must(t, err)
}

// TestDocsCommands calls the program with every posthaste command of the pages and --help: it parses the line, and
// does nothing. Outlines (…, [ID], a|b) are not commands.
func TestDocsCommands(t *testing.T) {
	t.Parallel()
	program := testenv.Program(t, "")
	makefile := read(t, "Makefile")
	tried := map[string]bool{}
	for _, p := range pages(t) {
		for _, line := range p.commands() {
			if m := makePattern.FindStringSubmatch(line); m != nil && !strings.Contains(makefile, "\n"+m[1]+":") {
				t.Errorf("%s: %q: the Makefile has no such target", p.name, line)
			}
			line = regexp.MustCompile(`^(?:timeout \S+ )?(?:\./bin/)?posthaste `).ReplaceAllString(line, "\x00")
			if line == "" || line[0] != 0 || tried[line] || strings.ContainsAny(line, "…[<|") {
				continue
			}
			tried[line] = true
			args := append(strings.Fields(line[1:]), "--help")
			if out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput(); err != nil {
				t.Errorf("%s: posthaste %s: %v\n%s", p.name, line[1:], err, out)
			}
		}
	}
	if len(tried) < 10 {
		t.Errorf("only %d commands found: %q", len(tried), slices.Sorted(maps.Keys(tried)))
	}
}

// TestDocsMachine compares the picture in docs/architecture.md with the table in relay/machine.go.
func TestDocsMachine(t *testing.T) {
	t.Parallel()
	source := read(t, "relay/machine.go")
	value := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\t((?:phase|on)[A-Z]\w*) +(?:phase|transition) = "(\w+)"`).
		FindAllStringSubmatch(source, -1) {
		value[m[1]] = m[2]
	}
	var want, have []string
	for _, m := range regexp.MustCompile(`\{(phase\w+), (on\w+), (phase\w+)\}`).FindAllStringSubmatch(source, -1) {
		want = append(want, value[m[1]]+" --> "+value[m[3]]+": "+value[m[2]])
	}
	for _, m := range fencePattern.FindAllStringSubmatch(read(t, "docs/architecture.md"), -1) {
		if m[1] == "mermaid" {
			have = append(have, regexp.MustCompile(`\w+ --> \w+: \w+`).FindAllString(m[2], -1)...)
		}
	}
	slices.Sort(want)
	slices.Sort(have)
	if len(want) == 0 || !slices.Equal(want, have) {
		t.Errorf("docs/architecture.md shows\n%s\nand relay/machine.go has\n%s", strings.Join(have, "\n"),
			strings.Join(want, "\n"))
	}
}

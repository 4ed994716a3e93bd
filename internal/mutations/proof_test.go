package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"posthaste/internal/lab/testenv"
)

const listBegin, listEnd = "<!-- safeguards: internal/mutations -->\n", "<!-- end of safeguards -->\n"

// list names the safeguards that have a mutation, by package; alone are those of the models without one.
func list(alone []string) string {
	names := map[string][]string{}
	for _, m := range mutations {
		pkg := strings.TrimPrefix(m.pkg, "./")
		names[pkg] = append(names[pkg], m.safeguard)
	}
	var b strings.Builder
	for _, pkg := range slices.Sorted(maps.Keys(names)) {
		b.WriteString(wrap("- `" + pkg + "`: " + strings.Join(names[pkg], "; ") + "."))
	}
	b.WriteString("\nSafeguards of `internal/model` without a mutation of their own:\n\n")
	return b.String() + wrap("- "+strings.Join(alone, "; ")+".")
}

// wrap breaks an item of a list into lines of at most 120 characters.
func wrap(item string) string {
	var b strings.Builder
	column := 0
	for i, word := range strings.Fields(item) {
		switch {
		case i == 0:
		case column+1+len(word) > 120:
			b.WriteString("\n  ")
			column = 2
		default:
			b.WriteString(" ")
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String() + "\n"
}

// The page has the safeguards of code and models, and the models have the names in it. POSTHASTE_TEST_WRITE=1 writes
// them.
func TestTheProofListsTheSafeguards(t *testing.T) {
	t.Parallel()
	root := testenv.Root(t)
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(root, name))
		testenv.Must(t, err)
		return string(text)
	}
	var names []string
	for _, m := range regexp.MustCompile(`(?m)^\t\t"([^"]+)": +\{"`).FindAllStringSubmatch(
		read("internal/model/model_test.go"), -1) {
		names = append(names, m[1])
	}
	if len(names) < 40 {
		t.Fatalf("the model has only %d safeguards", len(names))
	}
	guard := read("idem/model_test.go")
	used := map[string]bool{}
	for safeguard, name := range modelled {
		used[name] = true
		if !slices.ContainsFunc(mutations, func(m mutation) bool { return m.safeguard == safeguard }) {
			t.Errorf("no mutation is called %q", safeguard)
		}
		if !slices.Contains(names, name) && !strings.Contains(guard, `name: "`+name+`"`) {
			t.Errorf("no model has %q", name)
		}
	}
	want := list(slices.DeleteFunc(names, func(n string) bool { return used[n] }))
	page := read("docs/proof.md")
	before, rest, ok := strings.Cut(page, listBegin)
	got, after, more := strings.Cut(rest, listEnd)
	if !ok || !more {
		t.Fatal("docs/proof.md has no place for the list")
	}
	if os.Getenv("POSTHASTE_TEST_WRITE") != "" {
		page = before + listBegin + want + listEnd + after
		testenv.Must(t, os.WriteFile(filepath.Join(root, "docs/proof.md"), []byte(page), 0o600))
		return
	}
	if got != want {
		t.Error("docs/proof.md is out of date: POSTHASTE_TEST_WRITE=1 go test ./internal/mutations")
	}
}

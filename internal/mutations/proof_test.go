package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"posthaste/internal/testenv"
)

const tableBegin, tableEnd = "<!-- safeguards: internal/mutations -->\n", "<!-- end of safeguards -->\n"

// table lists each safeguard with its mutations; alone are safeguards of the models without a mutation of the code.
func table(alone []string) string {
	var b strings.Builder
	b.WriteString("| safeguard | the model goes without | the code goes without | test |\n|---|---|---|---|\n")
	for _, m := range mutations {
		model := modelled[m.safeguard]
		if model == "" {
			model = "not in the model"
		}
		fmt.Fprintf(&b, "| %s | %s | %s: %s | %s: %s |\n", m.safeguard, model, m.file, m.about,
			strings.TrimPrefix(m.pkg, "./"), strings.NewReplacer("Test", "", "|", ", ").Replace(m.test))
	}
	b.WriteString("\nSafeguards of internal/model without a mutation of their own:\n")
	var lines []string
	for some := range slices.Chunk(alone, 3) {
		lines = append(lines, strings.Join(some, "; "))
	}
	return b.String() + strings.Join(lines, ";\n") + ".\n"
}

// The page has the table of the mutations of code and models, and the models have the names in it.
// POSTHASTE_TEST_WRITE=1 writes it.
func TestTheProofHasTheTable(t *testing.T) {
	t.Parallel()
	root := testenv.Root(t)
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
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
	want := table(slices.DeleteFunc(names, func(n string) bool { return used[n] }))
	page := read("docs/proof.md")
	before, rest, ok := strings.Cut(page, tableBegin)
	got, after, more := strings.Cut(rest, tableEnd)
	if !ok || !more {
		t.Fatal("docs/proof.md has no place for the table")
	}
	if os.Getenv("POSTHASTE_TEST_WRITE") != "" {
		page = before + tableBegin + want + tableEnd + after
		if err := os.WriteFile(filepath.Join(root, "docs/proof.md"), []byte(page), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if got != want {
		t.Error("docs/proof.md is out of date: POSTHASTE_TEST_WRITE=1 go test ./internal/mutations")
	}
}

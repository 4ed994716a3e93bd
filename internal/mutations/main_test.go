package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Each mutation matches the code, changes it, and names an existing test.
func TestMutationsMatchTheCode(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..")
	seen := map[string]bool{}
	for _, m := range mutations {
		text, err := os.ReadFile(filepath.Join(root, m.file))
		if err != nil {
			t.Fatal(err)
		}
		if mutant, err := m.apply(string(text)); err != nil || mutant == string(text) {
			t.Errorf("%s: %v", m.safeguard, err)
		}
		if seen[m.safeguard] {
			t.Errorf("%s is there twice", m.safeguard)
		}
		seen[m.safeguard] = true
		files, err := filepath.Glob(filepath.Join(root, m.pkg, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		var tests strings.Builder
		for _, f := range files {
			code, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			tests.Write(code)
		}
		for test := range strings.SplitSeq(m.test, "|") {
			if !regexp.MustCompile(`(?m)^func ` + test).MatchString(tests.String()) {
				t.Errorf("%s: %s has no test %s", m.safeguard, m.pkg, test)
			}
		}
	}
}

// A mutation whose text is missing, or occurs twice, is an error.
func TestAMutationIsExact(t *testing.T) {
	t.Parallel()
	m := mutation{file: "f", old: "x", replacement: "y"}
	for _, text := range []string{"", "xx"} {
		if _, err := m.apply(text); err == nil {
			t.Errorf("%q was mutated", text)
		}
	}
	if got, err := m.apply("axb"); err != nil || got != "ayb" {
		t.Errorf("%q, %v", got, err)
	}
}

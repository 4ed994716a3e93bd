package docs_test

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// mark matches words for which the field has a plainer one.
var mark = regexp.MustCompile(`(?i)\b(who(ever|mever|m)?|nobody|somebody|anybody|everybody|ow(ed|es)|told|anew|` +
	`goes on|gone on|stands? still|has no say|forgets?|forgotten|remembers?|is to be|are to be|has to have|but for|` +
	`all the same|as a rule|of late|takes as long|beside|say so|says so|said so|asks|asked for|a look|is none|` +
	`are none)\b`)

var (
	sentenceEnd  = regexp.MustCompile(`[.:;!?]\s+|\n\s*\n`)
	quoted       = regexp.MustCompile("`[^`]*`|https?://\\S+|(?s:```.*?```)")
	literal      = regexp.MustCompile(`"(?:[^"\\\n]|\\.)*"`)
	commentBlock = regexp.MustCompile(`(?m)(?:^\s*(?://|--).*\n)+`)
	commentLine  = regexp.MustCompile(`(?m)^\s*(?://|--) ?(.*)\n`)
)

// budgets are how many sentences of each kind have a mark. They may only fall.
var budgets = map[string]int{"comments": 34, "comments of tests": 10, "texts": 2, "SQL and Lua": 6, "pages": 7}

// TestEnglish counts the sentences with a mark.
func TestEnglish(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "git", "ls-files").Output()
	must(t, err)
	found := map[string][]string{}
	count := func(kind, name, text string) {
		for _, s := range sentenceEnd.Split(text, -1) {
			if len(strings.Fields(s)) >= 4 && mark.MatchString(s) {
				found[kind] = append(found[kind], name+": "+s)
			}
		}
	}
	for name := range strings.FieldsSeq(string(out)) {
		switch {
		case name == "docs/english_test.go":
		case strings.HasSuffix(name, ".md"):
			count("pages", name, quoted.ReplaceAllString(read(t, name), " "))
		case strings.HasSuffix(name, ".sql"), strings.HasSuffix(name, ".lua"), strings.HasSuffix(name, ".go"):
			text, kind := read(t, name), "SQL and Lua"
			if strings.HasSuffix(name, ".go") {
				kind = "comments"
			}
			if strings.HasSuffix(name, "_test.go") {
				kind = "comments of tests"
			} else if kind == "comments" {
				for _, m := range literal.FindAllString(text, -1) {
					count("texts", name, m)
				}
			}
			for _, c := range commentBlock.FindAllString(text, -1) {
				count(kind, name, quoted.ReplaceAllString(commentLine.ReplaceAllString(c, "$1 "), " "))
			}
		}
	}
	for kind, budget := range budgets {
		switch n := len(found[kind]); {
		case n > budget:
			t.Errorf("%s: %d sentences have a mark, and %d had one before:\n%s", kind, n, budget,
				strings.Join(found[kind], "\n"))
		case n < budget:
			t.Errorf("%s: set its budget to %d", kind, n)
		}
	}
}

package console

import (
	"fmt"
	"html"
	"net/http"
	"regexp"
	"strings"

	"posthaste/docs"
)

const runbookHead = `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>posthaste: runbook</title>
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="console.css">
<script src="theme.js"></script>
</head>
<body>
<main class="runbook">
`

// runbook returns the handler of the runbook: a section for each alert, with the alert's name in lower case as its id.
func runbook() http.HandlerFunc {
	var page strings.Builder
	page.WriteString(runbookHead)
	for part := range strings.SplitSeq(strings.TrimPrefix(docs.Runbook, "# "), "\n### ") {
		name, text, _ := strings.Cut(part, "\n")
		text, _, _ = strings.Cut(text, "\n## ") // the heading of the next chapter
		fmt.Fprintf(&page, "<section class=\"card\" id=%q tabindex=\"-1\"><h1>%s</h1>%s</section>\n",
			strings.ToLower(name), name, htmlOf(text))
	}
	page.WriteString("</main>\n</body>\n</html>\n")
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write([]byte(page.String()))
	}
}

var inline = []struct {
	pattern *regexp.Regexp
	html    string
}{
	{regexp.MustCompile(`\*\*([^*]+)\*\*`), "<b>$1</b>"},
	{regexp.MustCompile("`([^`]+)`"), "<code>$1</code>"},
	{regexp.MustCompile(`\[([^\]]+)\]\((#[^)]+)\)`), `<a href="$2">$1</a>`},
	{regexp.MustCompile(`\[([^\]]+)\]\([^)]+\)`), "$1"}, // another page, which the console does not have
}

// htmlOf converts the Markdown of the runbook: paragraphs, lists, blocks of commands, and tables, which stay as they
// are.
func htmlOf(text string) string {
	var out strings.Builder
	for i, part := range strings.Split(html.EscapeString(text), "```") {
		if i%2 == 1 {
			_, commands, _ := strings.Cut(part, "\n") // after the language
			out.WriteString("<pre>" + commands + "</pre>")
			continue
		}
		for paragraph := range strings.SplitSeq(strings.ReplaceAll(part, "\n- ", "\n\n– "), "\n\n") {
			tag := "p"
			if strings.HasPrefix(paragraph, "|") {
				tag = "pre"
			}
			for _, m := range inline {
				paragraph = m.pattern.ReplaceAllString(paragraph, m.html)
			}
			if paragraph = strings.TrimSpace(paragraph); paragraph != "" {
				fmt.Fprintf(&out, "<%s>%s</%s>", tag, paragraph, tag)
			}
		}
	}
	return out.String()
}

package console

import (
	"bytes"
	"html/template"
	"net/http"
	"strings"

	"posthaste/docs"
)

// section is a section of the runbook, as Markdown.
type section struct{ Name, ID, Text string }

var runbookPage = template.Must(template.New("runbook").Parse(`<!doctype html>
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
{{range .}}<section class="card" id="{{.ID}}" tabindex="-1"><h1>{{.Name}}</h1><pre>{{.Text}}</pre></section>
{{end}}</main>
</body>
</html>
`))

// runbook returns the handler of the runbook: a section for each alert, with the alert's name in lower case as its id.
func runbook() http.HandlerFunc {
	var all []section
	for part := range strings.SplitSeq(strings.TrimPrefix(docs.Runbook, "# "), "\n### ") {
		name, text, _ := strings.Cut(part, "\n")
		text, _, _ = strings.Cut(text, "\n## ") // the heading of the next chapter
		all = append(all, section{name, strings.ToLower(name), strings.TrimSpace(text)})
	}
	var page bytes.Buffer
	if err := runbookPage.Execute(&page, all); err != nil {
		panic(err) // the build is broken
	}
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write(page.Bytes())
	}
}

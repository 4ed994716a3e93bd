// Package docs has the page of the documentation that the binary serves.
package docs

import _ "embed" // for Runbook

// Runbook is runbook.md.
//
//go:embed runbook.md
var Runbook string

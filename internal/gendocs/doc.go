// Package gendocs writes the pages of the documentation that follow from the code: docs/configuration.md from the
// structs that parse settings and commands, docs/metrics.md from the registries that the processes export.
//
// A metric without a note in notes.txt, or a note without a metric, is an error, so that the page stays
// complete. cmd/posthaste calls Write and Check, for make docs and make check. Help and completion are printed here.
package gendocs

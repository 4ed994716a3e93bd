// Package ops reads and changes a running posthaste for an operator: status, doctor, trace, dead events, consumer
// groups, adoption, and the verdict on all of it.
//
// The terminal (cmd/posthaste), the admin listener (api/admin) and the console (api/admin/console) all use this
// package, and only differ in how they show its results. It does not depend on HTTP, terminals or flags.
//
// Reads change nothing, except that they create the row of a relay that has never run. Every call ends with its
// context; none retries or logs. Clients and pools belong to the caller. Results contain no payloads and no secrets.
// Texts of others (names of groups and streams, errors of handlers) are passed on unchanged: the caller removes what
// could control a terminal or a page.
package ops

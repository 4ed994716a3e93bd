// Package ops is what an operator asks of a posthaste that runs, and what an operator does to it: status, doctor,
// trace, dead events, consumer groups, adoption, and the verdict on all of it.
//
// It is the same for everybody who asks. The terminal (cmd/posthaste), the admin listener (api/admin) and the console
// (api/admin/console) read and act through this package, and only show what it says, each in its own form. It knows
// nothing of HTTP, of terminals and of flags.
//
// What reads changes nothing, except that a relay's row is made where none has run yet. Every call ends with its
// context; none retries, and none logs. Clients and pools belong to the caller. What is returned holds no payload and
// no secret. Texts of others (names of groups and streams, errors of handlers) are passed on as they are: whoever shows
// them takes out what could steer a terminal or a page.
package ops

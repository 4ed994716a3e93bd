// Package sql holds the schema and every SQL statement of posthaste: the migrations, one file per statement under
// queries/, and a typed function for each. It also implements the parts of relay.Relay that live in Postgres: the
// state row, the locks, settling, the audit's probes.
//
// Names are unqualified on purpose: every connection has posthaste's schema in front of its search path (ConnConfig).
package sql

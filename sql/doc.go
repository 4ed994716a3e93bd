// Package sql holds the schema of posthaste's tables and the statements of the relay, the orders and the sweep: the
// migrations, one file per statement under queries/, and a typed function for each. It also implements the parts of
// relay.Relay that live in Postgres: the state row, the locks, settling, the audit's probes.
//
// Every migration is here, because one schema has one order of changes. Statements that only one other package runs are
// in that package, in a folder queries of its own: those of the ledger in credits, because they mean nothing without its
// rules; those about the slot and the publication in cdc, because they need no table of posthaste's; those of the inbox in
// consumer/inbox, because a consumer must be able to import it without the relay's side.
//
// Names are unqualified on purpose: every connection has posthaste's schema in front of its search path (ConnConfig).
package sql

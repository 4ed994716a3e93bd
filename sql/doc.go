// Package sql holds the schema of posthaste's tables and the statements of the relay, the orders and the sweep: the
// migrations, one file per statement under queries/, and a typed function for each. Beside them are those that commands
// share with the relay: its state, its backlog, parked events, history. It also implements the ports of package outbox
// that live in Postgres: Store and Locker.
//
// Every migration is here, because one schema has one order of changes. Statements that only one other package runs are
// in that package, in a folder queries of its own: those of the ledger in credits, because they mean nothing without
// its rules; those about the slot and the publication in cdc, because they read no table of posthaste's; those of the
// inbox in consumer/inbox, because a consumer imports it without the relay's side; those of the doctor and the trace in
// internal/ops, because they look at what no other part has a use for.
//
// Names of tables are unqualified on purpose: every connection has posthaste's schema in front of its search path
// (ConnConfig). Names of functions are not, unless they have no arguments, and operators get arguments of exactly the
// types of one in pg_catalog: otherwise a function or an operator in the schema that fits better would be called, with
// the rights of whoever relays. A search path with pg_catalog in front does not prevent that.
package sql

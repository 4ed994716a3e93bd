// Package sql contains the schema of posthaste's tables and the statements of the relay, the orders and the sweep: the
// migrations, one file per statement under queries/, and a typed function for each. Commands share the statements for
// the relay's state, its backlog, parked events and history. The package implements the ports of package outbox that
// use Postgres: Store and Locker.
//
// Every migration is here, because one schema has one order of changes. Statements that only one other package uses are
// in a folder queries of that package: credits has those of the ledger, which need its rules; cdc those of slot and
// publication, which read none of posthaste's tables; consumer/inbox those of the inbox, which consumers import without
// the relay; internal/ops those of the doctor and the trace.
//
// Names of tables are unqualified: every connection has posthaste's schema as its search path (ConnConfig). Names of
// functions are qualified unless they have no arguments, and operators get arguments of exactly the types of one in
// pg_catalog. Otherwise Postgres would call a better matching function or operator in the schema, with the rights of
// the relay. A search path that begins with pg_catalog does not prevent that.
package sql

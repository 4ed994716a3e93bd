// Package bridge uses an outbox table of another system as it is: a trigger copies each inserted row into posthaste's
// outbox, in the transaction that inserts it.
//
// A bridge is three objects. The function and the sequence have the same name and are in posthaste's schema; the
// trigger is on the table. The function is SECURITY DEFINER, so writers need no further right; its comment holds the
// Config as JSON. The sequence counts the copied rows.
//
// The function never calls a cast of a column's type: the owner of the table could replace it, and it would run with
// the rights of the function's owner. It reads columns with concat, which calls output functions only, or checks that
// the type is still one of Postgres' own.
//
// A statement fires the trigger of an ordinary table once. Postgres does not fire that of a partitioned table for
// inserts into a partition, so there each row fires it.
package bridge

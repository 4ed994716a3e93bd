// Package cli is the dialogue of a command with the terminal: streams, questions, progress, tables, and errors with
// their remedies.
//
// It depends on no command and no setting. Commands in cmd/posthaste and the engines behind them call it; a library
// package (relay, sink, sql, …) never does. Its output is for people, so it ignores write errors. IO.JSON, whose
// output programs read, returns them.
package cli

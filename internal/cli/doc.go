// Package cli is what a command and the terminal say to each other: streams, questions, progress, tables, and errors
// with their remedies.
//
// It knows no command and no setting. Commands in cmd/posthaste and the engines behind them call it; a library package
// (relay, sink, sql, …) never does. What it prints is for people, so it ignores errors of writing: when nobody reads
// any more, there is nobody to tell. IO.JSON, which programs read, returns them.
package cli

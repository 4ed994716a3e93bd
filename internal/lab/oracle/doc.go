// Package oracle writes events, and knows which of them must be in the streams.
//
// A Truth has the outcome of each event that a Job has written. A Pass compares the entries of the streams with it:
// lost, duplicated, phantom, reordered and corrupted events. Campaigns (internal/prove) and system tests
// (internal/lab/testenv) have it in common. The tests of internal/prove cover it.
package oracle

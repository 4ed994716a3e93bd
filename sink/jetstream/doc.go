// Package jetstream publishes events to NATS JetStream, and makes every publish safe to repeat.
//
// Each stream of the outbox is one JetStream stream. It stores the events, on a subject for each aggregate, and the
// gate, on subjects that consumers of the events do not see. The gate is a log in the log: the last message of the
// owner's subject names the owner and the doubt, and the last message of each lane's subject names the claim and the
// last batch of the lane.
//
// A publish is one atomic batch: the events, and behind them the next message of the lane. That message carries the
// expected sequence of the one before, so the server refuses a second batch with the same number. An adoption is one
// atomic batch as well. It rewrites the messages of all lanes, so the server refuses every later batch of an earlier
// owner. A lost reply is resolved by reading the lane's last message.
//
// The sequences of a stream that is made again begin at 1. Therefore the gate's subjects contain a random token, which
// is part of the configuration of the stream: a batch for an earlier stream has no gate in the later one.
package jetstream

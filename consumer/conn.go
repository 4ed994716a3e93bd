package consumer

import (
	"context"
	"strings"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// readConn is the only connection on which a reader requests new entries.
//
// Redis may execute a command long after the client has given it up, because it waits in a socket or a proxy. Such a
// late read delivers entries that this consumer does not receive, while it reads newer ones of the same subjects on
// another connection. So before a reader uses another connection, it makes the server end the old one. Reads executed
// by then have left pending entries, which are read again; no other will be executed.
type readConn struct {
	c *Consumer
	// size says how long an answer may take.
	size *readSize
	tx   *redis.Tx
	me   peer
	// doubtful are connections that were given up during a read.
	doubtful []peer
	// helpless is set when the server has refused to end one, so that this is logged once.
	helpless bool
}

// peer identifies a connection and the server of a stream that it belongs to. After a restart of the server its number
// alone may be another connection's.
type peer struct{ id, addr, of string }

// with runs do while it holds a connection to the server that holds stream.
func (r *readConn) with(ctx context.Context, stream string, do func() error) error {
	node, err := redisurl.Holder(ctx, r.c.client, stream)
	if err != nil {
		return err
	}
	// Watch without a key is the client's way to lend a connection that shares no options with its others; those of
	// Conn are written without a lock when another connection is made meanwhile.
	return waits(node, r.size.patience).Watch(ctx, func(tx *redis.Tx) error {
		info, err := tx.Do(ctx, "client", "info").Text()
		if err != nil && !isServerError(err) {
			return err
		}
		r.me = peer{id: clientField(info, "id"), addr: clientField(info, "addr"), of: stream}
		r.tx = tx
		defer func() { r.tx = nil }()
		return do()
	})
}

// settled ends the doubtful connections.
func (r *readConn) settled(ctx context.Context) error {
	for len(r.doubtful) > 0 {
		old := r.doubtful[0]
		node, err := redisurl.Holder(ctx, r.c.client, old.of)
		if err == nil {
			err = node.Do(ctx, "client", "kill", "id", old.id, "addr", old.addr).Err()
		}
		switch {
		case err == nil:
		case !isServerError(err):
			return err
		case !r.helpless:
			r.helpless = true
			r.c.log.Warn("a read that was given up cannot be ended, and may still be carried out: its entries would "+
				"come late, behind newer ones of their subjects",
				"remedy", "let this user call CLIENT INFO and CLIENT KILL", "err", err)
		}
		r.doubtful = r.doubtful[1:]
	}
	return nil
}

// read runs a command that hands out entries. An error that leaves open whether it was carried out makes the connection
// doubtful; the caller gives it up.
func (r *readConn) read(ctx context.Context, cmd redis.Cmder) error {
	err := r.tx.Process(ctx, cmd)
	if err != nil && !redisurl.IsReply(err) {
		r.doubtful = append(r.doubtful, r.me)
	}
	return err
}

// clientField takes a field out of what CLIENT INFO answers.
func clientField(info, name string) string {
	for f := range strings.FieldsSeq(info) {
		if k, v, _ := strings.Cut(f, "="); k == name {
			return v
		}
	}
	return ""
}

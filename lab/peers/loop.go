package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
)

const (
	// publication is what the bare loop and pg_recvlogical read.
	publication = "peers"
	// stream is where every peer's events go. It is the name that posthaste gives it.
	stream = "outbox.bench"
	// batchSize is how many entries one pipeline has at most.
	batchSize = 1000
)

// received is an event, or a commit, which has no values.
type received struct {
	values []any
	lsn    pglogrepl.LSN
}

// loop is the simplest relay: it reads the slot and adds an entry for each event, up to most of them in a pipeline.
// It has no retries, no order between two instances, and no recovery if the slot is lost.
func loop(ctx context.Context, postgres, redisURL, slot string, most int) error {
	opt, err := redis.ParseURL(redisURL)
	if err != nil {
		return err
	}
	client := redis.NewClient(opt)
	defer client.Close()
	conn, err := pgconn.Connect(ctx, postgres+"&replication=database")
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	err = pglogrepl.StartReplication(ctx, conn, slot, 0, pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", "publication_names '" + publication + "'"},
	})
	if err != nil {
		return err
	}
	events := make(chan received, 2*batchSize)
	var done atomic.Uint64
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return receive(ctx, conn, events, &done) })
	g.Go(func() error { return publish(ctx, client, events, most, &done) })
	return g.Wait()
}

// receive decodes the slot's messages, and confirms every few seconds what is in the stream.
func receive(ctx context.Context, conn *pgconn.PgConn, events chan<- received, done *atomic.Uint64) error {
	const every = 5 * time.Second
	relations := map[uint32]*pglogrepl.RelationMessage{}
	for next := time.Now().Add(every); ; {
		if time.Now().After(next) {
			next = time.Now().Add(every)
			status := pglogrepl.StandbyStatusUpdate{WALWritePosition: pglogrepl.LSN(max(1, done.Load()))}
			if err := pglogrepl.SendStandbyStatusUpdate(ctx, conn, status); err != nil {
				return err
			}
		}
		rctx, cancel := context.WithDeadline(ctx, next)
		msg, err := conn.ReceiveMessage(rctx)
		cancel()
		if pgconn.Timeout(err) && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return err
		}
		data, ok := msg.(*pgproto3.CopyData)
		if !ok {
			return fmt.Errorf("postgres sent %T", msg)
		}
		if data.Data[0] != pglogrepl.XLogDataByteID {
			continue // a keepalive
		}
		xld, err := pglogrepl.ParseXLogData(data.Data[1:])
		if err != nil {
			return err
		}
		logical, err := pglogrepl.Parse(xld.WALData)
		if err != nil {
			return err
		}
		var e received
		switch m := logical.(type) {
		case *pglogrepl.RelationMessage:
			relations[m.RelationID] = m
			continue
		case *pglogrepl.InsertMessage:
			e.values = entry(relations[m.RelationID], m.Tuple)
		case *pglogrepl.CommitMessage:
			e.lsn = m.TransactionEndLSN
		default:
			continue
		}
		select {
		case events <- e:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// fields are what an entry has, by the column that it comes from.
var fields = map[string]string{
	"id": "id", "aggregate_id": "subject", "event_type": "type", "created_at": "time", "payload": "data",
}

func entry(rel *pglogrepl.RelationMessage, row *pglogrepl.TupleData) []any {
	values := make([]any, 0, 2*len(fields)+2)
	for i, c := range row.Columns {
		if name, ok := fields[rel.Columns[i].Name]; ok {
			values = append(values, name, string(c.Data))
		}
	}
	return append(values, "source", "/peers")
}

// publish adds what has come meanwhile, as many as most at once.
func publish(ctx context.Context, client *redis.Client, events <-chan received, most int, done *atomic.Uint64) error {
	for {
		var first received
		select {
		case first = <-events:
		case <-ctx.Done():
			return ctx.Err()
		}
		pipe, lsn := client.Pipeline(), first.lsn
		for e, n := first, 0; ; {
			if e.values != nil {
				pipe.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: e.values})
				n++
			}
			lsn = max(lsn, e.lsn)
			if n >= most || len(events) == 0 {
				break
			}
			e = <-events
		}
		if pipe.Len() > 0 {
			if _, err := pipe.Exec(ctx); err != nil {
				return err
			}
		}
		if lsn > 0 {
			done.Store(uint64(lsn))
		}
	}
}

package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/outbox"
	"posthaste/sql"
)

// Drain measures events per second, from the outbox to delivered and settled.
type Drain struct {
	Options
	Sink

	Events      int    `help:"Events of one measurement." default:"20000"`
	Size        int    `help:"Bytes of an event's payload." default:"300"`
	Transaction int    `help:"Events of one transaction." default:"1"`
	Streams     int    `help:"Streams that the events take turns in." default:"1"`
	Mode        string `help:"cdc, poll or both." enum:"cdc,poll,both" default:"both"`
	Load        string `enum:"backlog,stream,both" default:"both"`
}

// Run measures and prints the report. It returns a usage error for options that cannot be measured, and ErrFound if
// the result is wrong.
func (c Drain) Run(ctx context.Context, config app.Config, o cli.IO) error {
	if c.Events < 1 || c.Transaction < 1 || c.Size < 16 || c.Size > 1<<20 || c.Streams < 1 || c.Streams > 1000 {
		return cli.Usage("--events and --transaction must be at least 1, --size from 16 to 1048576, --streams from 1 " +
			"to 1000")
	}
	r := &report{
		Bench: "drain", Settings: map[string]any{
			"events": c.Events, "size": c.Size, "transaction": c.Transaction, "streams": c.Streams,
			"writers": writers, "sweep_workers": config.SweepWorkers,
		},
	}
	return benchmark(ctx, config, o, c.Options, c.Sink, r, func(b *session) []step {
		d := &drain{session: b, c: c}
		steps := []step{
			{"limits in Postgres", 3 * c.Events, d.postgresLimits},
			{"limit in Redis", c.Events, d.redisLimit},
		}
		if b.sink.nats() {
			steps[1] = step{"limit in NATS", c.Events, d.natsLimit}
		}
		for _, load := range only(c.Load, "backlog", "stream") {
			for _, mode := range only(c.Mode, modes...) {
				run := d.backlog
				if load == "stream" {
					run = d.stream
				}
				in := func(ctx context.Context) error { return run(ctx, mode) }
				steps = append(steps, step{load + " " + string(mode), c.Events, in})
			}
		}
		return steps
	})
}

type drain struct {
	*session
	c Drain
}

func perSecond(n int, since time.Time) float64 { return float64(n) / time.Since(since).Seconds() }

// postgresLimits measures Postgres without a relay: writing the events, sending them through a slot, and reading them
// page by page, with a mark for each page.
func (d *drain) postgresLimits(ctx context.Context) error {
	return d.in(ctx, func(ctx context.Context, s *scene) error {
		if err := s.makeSlot(ctx); err != nil {
			return err
		}
		what := fmt.Sprintf("transactions of %d into the outbox, over %d connections, written by the server itself",
			d.c.Transaction, writers)
		err := d.limit(ctx, "insert", what, func() error {
			return s.write(ctx, d.c.Events, d.c.Size, d.c.Transaction)
		})
		if err == nil {
			what = "a bare reader of the slot: those transactions over TCP, counted and discarded; nothing is published"
			err = d.limit(ctx, "slot", what, func() error { return s.readSlot(ctx, d.c.Events) })
		}
		if err == nil {
			what = fmt.Sprintf("pages of 1,000 rows read from the log, and a mark after each, over %d connections",
				s.config.SweepWorkers)
			err = d.limit(ctx, "settle", what, func() error { return s.settleAll(ctx, d.c.Events) })
		}
		return err
	})
}

// limit measures something that handles all events.
func (d *drain) limit(ctx context.Context, name, what string, do func() error) error {
	before := d.progress.count.Load()
	used, began := d.usage(ctx), time.Now()
	if err := do(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	d.progress.count.Store(before + int64(d.c.Events))
	w := d.report.limit(name, what)
	w.is("per_second", perSecond(d.c.Events, began))
	now := d.usage(ctx)
	used.note(w, now, d.c.Events)
	if us := (now.own - used.own) * 1e6 / float64(d.c.Events); us >= 0.05 { // less: no client
		w.is("client_cpu_us", us)
	}
	return nil
}

// readSlot reads n inserts from the slot. It lets the socket fill before each read: a wake-up for every message would
// cost more than the decoding.
func (s *scene) readSlot(ctx context.Context, n int) error {
	cfg, err := sql.ConnConfig(s.config.PostgresURL, s.config.Schema, "bench")
	if err != nil {
		return err
	}
	cfg.RuntimeParams["replication"] = "database"
	cfg.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		return pgproto3.NewFrontend(bufio.NewReaderSize(gulping{r}, 256<<10), w)
	}
	conn, err := sql.ConnectReplication(ctx, cfg)
	if err != nil {
		return err
	}
	closed := context.AfterFunc(ctx, func() { _ = conn.Conn().Close() })
	defer func() {
		closed()
		_ = conn.Conn().Close() // the stream is unfinished, so its error does not matter
	}()
	err = pglogrepl.StartReplication(ctx, conn, s.config.Slot, 0, pglogrepl.StartReplicationOptions{
		Mode:       pglogrepl.LogicalReplication,
		PluginArgs: []string{"proto_version '1'", "publication_names '" + s.config.Publication + "'"},
	})
	if err != nil {
		return err
	}
	for have := 0; have < n; {
		msg, err := conn.ReceiveMessage(context.Background()) // a context per message would cost a timer each
		if err != nil {
			return err
		}
		m, ok := msg.(*pgproto3.CopyData)
		switch {
		case !ok:
		case m.Data[0] == pglogrepl.XLogDataByteID && len(m.Data) > 25 &&
			m.Data[25] == byte(pglogrepl.MessageTypeInsert):
			have++
		case m.Data[0] == pglogrepl.PrimaryKeepaliveMessageByteID && m.Data[len(m.Data)-1] == 1:
			answer := pglogrepl.StandbyStatusUpdate{WALWritePosition: 1}
			if err := pglogrepl.SendStandbyStatusUpdate(ctx, conn, answer); err != nil {
				return err
			}
		}
	}
	return nil
}

// gulping sleeps before each read.
type gulping struct{ r io.Reader }

// Read implements io.Reader.
func (g gulping) Read(p []byte) (int, error) {
	time.Sleep(200 * time.Microsecond)
	return g.r.Read(p)
}

// The least that Postgres does to settle an event: it reads the event, and writes a mark for its page.
const (
	barePage = `SELECT seq, id, aggregate_type, aggregate_id, event_type, payload::text, headers::text, created_at
FROM outbox_rows WHERE part = $1 AND seq > $2 ORDER BY seq LIMIT 1000`
	bareMark = `INSERT INTO outbox_mark (part, epoch, settled, hi, pass, pass_hi, cursor, mode)
VALUES ($1, 0, '3:3:', 0, '3:3:', 0, $2, 'poll')`
)

// settleAll reads every row, with as many parts at once as the relay sweeps.
func (s *scene) settleAll(ctx context.Context, n int) error {
	cfg, err := sql.RelayPoolConfig(s.config.PostgresURL, s.config.Schema)
	if err != nil {
		return err
	}
	cfg.MaxConns = int32(s.config.SweepWorkers) //nolint:gosec // at most outbox.Partitions
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	var have atomic.Int64
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(s.config.SweepWorkers)
	for part := range outbox.Partitions {
		g.Go(func() error { return settlePart(gctx, pool, part, &have) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if int(have.Load()) != n {
		return fmt.Errorf("%d rows were read of %d", have.Load(), n)
	}
	return nil
}

func settlePart(ctx context.Context, pool *pgxpool.Pool, part int, have *atomic.Int64) error {
	for last := int64(0); ; {
		rows, err := pool.Query(ctx, barePage, part, last)
		if err != nil {
			return err
		}
		n := int64(0)
		for rows.Next() {
			if err := rows.Scan(&last, nil, nil, nil, nil, nil, nil, nil); err != nil {
				return err
			}
			n++
		}
		if err := rows.Err(); err != nil || n == 0 {
			return err
		}
		have.Add(n)
		if _, err := pool.Exec(ctx, bareMark, part, last); err != nil {
			return err
		}
	}
}

// redisLimit measures the same entries without a gate, in pipelines over two connections.
func (d *drain) redisLimit(ctx context.Context) error {
	key := fmt.Sprintf("posthaste-bench-%s-bare", d.name)
	defer d.redis.Unlink(context.WithoutCancel(ctx), key)
	payload := payloadOf(d.c.Size)
	return d.limit(ctx, "xadd", "the same entries by XADD in pipelines of 1,000, over 2 connections", func() error {
		return inChunks(ctx, 2, d.c.Events, 1000, func(ctx context.Context, _, from, to int) error {
			_, err := d.redis.Pipelined(ctx, func(p redis.Pipeliner) error {
				for n := from; n < to; n++ {
					p.XAdd(ctx, &redis.XAddArgs{Stream: key, Values: bareEntry(n, payload)})
				}
				return nil
			})
			if err != nil {
				return fmt.Errorf("write entries: %w", err)
			}
			d.progress.add(to - from)
			return nil
		})
	})
}

func bareEntry(n int, payload string) []any {
	return []any{
		"id", eventID(n).String(), "type", eventType, "source", "/posthaste/bench", "subject", fmt.Sprint(n),
		"time", "2006-01-02T15:04:05.000000Z", "data", payload, "specversion", "1.0",
	}
}

// backlog measures a relay that starts with a full outbox.
func (d *drain) backlog(ctx context.Context, mode outbox.Mode) error {
	return d.in(ctx, func(ctx context.Context, s *scene) error {
		s.streams = d.c.Streams
		const bytes = 1 << 20 // of a transaction
		if err := s.write(ctx, d.c.Events, d.c.Size, max(1, min(500, bytes/d.c.Size))); err != nil {
			return err
		}
		w := d.report.result("backlog "+string(mode), "from the relay's start until all is settled")
		peaks := resetPeak()
		used, began := d.usage(ctx), time.Now()
		err := s.relayed(ctx, mode, func(ctx context.Context, p *app.Relay) error {
			now, err := d.empties(ctx, s, p, w, used, began)
			w.is("settle_wal_bytes", (now.wal-used.wal)/float64(d.c.Events))
			if _, rss := memory(); err == nil && peaks && rss > 0 {
				w.is("relay_peak_rss_mib", rss/(1<<20))
			}
			return err
		})
		if err != nil {
			return err
		}
		return d.verdict(ctx, s, w, "settle", d.sink.bareBatches())
	})
}

// stream measures a relay while the events are written as fast as Postgres accepts them.
func (d *drain) stream(ctx context.Context, mode outbox.Mode) error {
	return d.in(ctx, func(ctx context.Context, s *scene) error {
		s.streams = d.c.Streams
		w := d.report.result("stream "+string(mode), fmt.Sprintf("from the first insert until all is settled; events "+
			"are written in transactions of %d as fast as Postgres takes them", d.c.Transaction))
		err := s.relayed(ctx, mode, func(ctx context.Context, p *app.Relay) error {
			if err := s.inMode(ctx, p, mode); err != nil {
				return err
			}
			used, began := d.usage(ctx), time.Now()
			var written time.Time
			g, gctx := errgroup.WithContext(ctx)
			g.Go(func() error {
				defer func() { written = time.Now() }()
				return s.write(gctx, d.c.Events, d.c.Size, d.c.Transaction)
			})
			var now usage
			g.Go(func() (err error) {
				now, err = d.empties(gctx, s, p, w, used, began)
				return err
			})
			if err := g.Wait(); err != nil {
				return err
			}
			bytes := (now.wal - used.wal) / float64(d.c.Events)
			w.is("wal_bytes", bytes)
			w.is("settle_wal_bytes", bytes-d.report.find("insert").last("wal_bytes"))
			w.is("behind_ms", millis(time.Since(written)))
			return nil
		})
		if err != nil {
			return err
		}
		limits := []string{"insert", "slot", "settle", d.sink.bareBatches()}
		if mode == outbox.ModePoll {
			limits = slices.DeleteFunc(limits, func(l string) bool { return l == "slot" })
		}
		return d.verdict(ctx, s, w, limits...)
	})
}

// empties waits until all events are published and settled, records the rate, and returns the usage at that time.
func (d *drain) empties(ctx context.Context, s *scene, p *app.Relay, w *row, used usage, began time.Time,
) (usage, error) {
	if err := s.published(ctx, p, d.c.Events); err != nil {
		return usage{}, err
	}
	published := perSecond(d.c.Events, began)
	if err := s.settled(ctx, p); err != nil {
		return usage{}, err
	}
	w.is("published_per_second", published)
	w.is("settled_per_second", perSecond(d.c.Events, began))
	w.is("payload_mib_per_second", published*float64(d.c.Size)/(1<<20))
	now := d.usage(ctx)
	used.noteCPU(w, now, d.c.Events)
	w.is("relay_cpu_us", (now.own-used.own)*1e6/float64(d.c.Events))
	return now, nil
}

// verdict counts the events, and names the limit of the rate.
func (d *drain) verdict(ctx context.Context, s *scene, w *row, limits ...string) error {
	c, err := s.count(ctx, d.c.Events)
	if err != nil {
		return err
	}
	w.checked(c)
	s.noteSize(ctx, w, d.c.Events)
	lowest := d.report.against(w, "settled_per_second", limits...)
	w.Bound = fmt.Sprintf("%s, the lowest limit on its way", lowest)
	if busy := w.median("busy_percent"); busy >= 90 {
		w.Bound = fmt.Sprintf("the processors (%.0f %% busy); the lowest limit on its way is %s", busy, lowest)
	}
	return nil
}

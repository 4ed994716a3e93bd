package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/internal/local"
	"posthaste/internal/pause"
)

// writers is how many connections insert at once.
const writers = 16

// load is what every peer is given.
type load struct {
	name string
	// backlog is there when the peer starts; otherwise rate is transactions a second, 0 as many as the writers can.
	backlog bool
	rate    float64
}

func loadsOf(c options) (list []load) {
	if c.backlog > 0 {
		list = append(list, load{name: fmt.Sprintf("backlog of %d", c.backlog), backlog: true})
	}
	for _, r := range c.rates {
		name := fmt.Sprintf("%g/s", r)
		if r == 0 {
			name = fmt.Sprintf("%d writers", writers)
		}
		list = append(list, load{name: name, rate: r})
	}
	return list
}

// figures are what one measurement found, by name.
type figures map[string]float64

// start starts the peer, if there is one, and returns what ends it. The context that it returns ends with the peer.
func (s *scene) start(ctx context.Context) (p *local.Process, during context.Context, stop func(), err error) {
	if s.peer.command == nil {
		return nil, ctx, func() {}, nil
	}
	argv := s.peer.command(s)
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:noctx // stop ends it
	var out bytes.Buffer
	cmd.Stderr = &out
	if p, err = local.StartProcess(cmd, syscall.SIGKILL); err != nil {
		return nil, ctx, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		<-p.Done()
		cancel(fmt.Errorf("it ended, %s: %s", cmd.ProcessState, strings.TrimSpace(out.String())))
	}()
	return p, ctx, func() { _ = p.Stop(os.Interrupt, 20*time.Second) }, nil
}

// payload is the text of an event's payload in SQL. It begins with when it was written, in nanoseconds.
func (s *scene) payload() string {
	pad := make([]byte, (s.size-len(`{"at": 1234567890123456789, "pad": ""}`)+1)/2)
	_, _ = rand.Read(pad)
	return `'{"at": ' || (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint || ', "pad": "` +
		hex.EncodeToString(pad) + `"}'`
}

// write has the server write for so long, one event a transaction, and returns how many it wrote. Clients of its own
// would take processors from what is measured.
func (s *scene) write(ctx context.Context, rate float64, lasts time.Duration) (n int, err error) {
	sleep := ""
	if rate > 0 {
		sleep = fmt.Sprintf(
			"PERFORM pg_sleep(greatest(0, n / %g::float8 - extract(epoch FROM clock_timestamp() - began)));", rate)
	}
	count := make([]int, writers)
	g, ctx := errgroup.WithContext(ctx)
	for w := range writers {
		g.Go(func() error {
			conn, err := s.pool.Acquire(ctx)
			if err != nil {
				return err
			}
			defer conn.Release()
			_, err = conn.Exec(ctx, fmt.Sprintf(`DO $do$ DECLARE began timestamptz := clock_timestamp(); n bigint := %d;
BEGIN LOOP %s EXIT WHEN clock_timestamp() >= began + interval '%d microseconds'; `+s.peer.table.insert+`; COMMIT;
n := n + %d; END LOOP; PERFORM set_config('peers.n', n::text, false); END $do$`, w+1, sleep, lasts.Microseconds(),
				s.payload(), writers))
			if err != nil {
				return fmt.Errorf("write events: %w", err)
			}
			var last string
			if err := conn.QueryRow(ctx, "SELECT current_setting('peers.n')").Scan(&last); err != nil {
				return err
			}
			count[w], err = strconv.Atoi(last)
			count[w] = (count[w] - w - 1) / writers
			return err
		})
	}
	err = g.Wait()
	for _, c := range count {
		n += c
	}
	return n, err
}

// drain measures a peer that starts in front of a backlog, from its start until all is in the stream.
func (s *scene) drain(ctx context.Context) (figures, error) {
	const chunk = 500
	for from := 1; from <= s.backlog; from += chunk {
		_, err := s.pool.Exec(ctx, fmt.Sprintf(s.peer.table.insert+" FROM generate_series(%d::bigint, %d) n",
			s.payload(), from, min(from+chunk-1, s.backlog)))
		if err != nil {
			return nil, fmt.Errorf("write events: %w", err)
		}
	}
	used, began := s.usage(ctx, nil), time.Now()
	p, ctx, stop, err := s.start(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	n, _, err := s.await(ctx, s.backlog, 6*s.lasts, func(ctx context.Context) (int, error) {
		n, err := s.redis.XLen(ctx, stream).Result()
		return int(n), err
	})
	if err != nil {
		return nil, err
	}
	f := figures{"events_per_second": float64(n) / time.Since(began).Seconds(), "missing": float64(s.backlog - n)}
	f.note(used, s.usage(ctx, p), n)
	return f, nil
}

// follow measures a peer while events are written.
func (s *scene) follow(ctx context.Context, rate float64) (figures, error) {
	p, ctx, stop, err := s.start(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	c := &consumer{redis: s.redis}
	rctx, stopReading := context.WithCancel(ctx)
	reading := make(chan error, 1)
	defer func() {
		stopReading()
		_ = <-reading // what is missing is seen
	}()
	go func() { reading <- c.read(rctx) }()
	if err := s.ready(ctx, c); err != nil {
		return nil, err
	}
	used, began := s.usage(ctx, p), time.Now()
	written, err := s.write(ctx, rate, s.lasts)
	if err != nil {
		return nil, errors.Join(err, context.Cause(ctx))
	}
	f := figures{"inserts_per_second": float64(written) / time.Since(began).Seconds(), "written": float64(written)}
	if s.peer.command == nil {
		f.note(used, s.usage(ctx, p), written)
		delete(f, "relay_us")
		return f, nil
	}
	n, behind, err := s.await(ctx, written, s.lasts, c.arrived)
	if err != nil {
		return nil, err
	}
	f.note(used, s.usage(ctx, p), n)
	f["missing"], f["behind_ms"] = float64(written-n), millis(behind)
	if took := c.take(); len(took) > 0 {
		slices.Sort(took)
		f["p50_ms"], f["p99_ms"] = millis(took[len(took)/2]), millis(took[len(took)*99/100])
	}
	return f, nil
}

// note adds processor time per event.
func (f figures) note(used, now usage, n int) {
	each := 1e6 / float64(max(1, n))
	f["relay_us"], f["postgres_us"] = (now.relay-used.relay)*each, (now.postgres-used.postgres)*each
	f["redis_us"] = (now.redis - used.redis) * each
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// ready waits until the peer streams: an event has come through, and its slot is in use.
func (s *scene) ready(ctx context.Context, c *consumer) error {
	if s.peer.command == nil {
		return nil
	}
	const patience = 30 * time.Second
	_, err := s.pool.Exec(ctx, fmt.Sprintf(s.peer.table.insert+" FROM generate_series(0::bigint, 0) n", s.payload()))
	if err != nil {
		return err
	}
	if _, _, err := s.await(ctx, 1, patience, c.arrived); err != nil {
		return err
	}
	if s.peer.table == &outboxTable {
		_, _, err := s.await(ctx, 1, patience, func(ctx context.Context) (n int, err error) {
			err = s.admin.QueryRow(ctx, "SELECT count(*) FROM pg_replication_slots WHERE database = $1 AND active",
				s.name).Scan(&n)
			return n, err
		})
		if err != nil {
			return fmt.Errorf("its slot: %w", err)
		}
	}
	if err := pause.For(ctx, time.Second); err != nil { // whatever else a start brings
		return errors.Join(err, context.Cause(ctx))
	}
	c.take()
	return nil
}

// await polls until there are n, for most at most, and returns the count and the time. A count of zero is an error. A
// peer that publishes nothing has all of them when everything that was written before has been sent to it.
func (s *scene) await(ctx context.Context, n int, most time.Duration, ask func(ctx context.Context) (int, error),
) (have int, took time.Duration, err error) {
	if s.peer.bare {
		var end string
		if err := s.admin.QueryRow(ctx, "SELECT pg_current_wal_lsn()::text").Scan(&end); err != nil {
			return 0, 0, err
		}
		ask = func(ctx context.Context) (have int, err error) {
			err = s.admin.QueryRow(ctx, `SELECT count(*) * $3::int FROM pg_stat_replication JOIN pg_replication_slots
				ON pid = active_pid WHERE slot_name = $2 AND sent_lsn >= $1::text::pg_lsn`, end, s.name, n).Scan(&have)
			return have, err
		}
	}
	for began := time.Now(); ; {
		have, err = ask(ctx)
		if took = time.Since(began); err != nil || have >= n || took > most {
			if err == nil && have == 0 {
				err = fmt.Errorf("nothing came through in %v", most)
			}
			return have, took, errors.Join(err, context.Cause(ctx))
		}
		if err := pause.For(ctx, 5*time.Millisecond); err != nil {
			return have, took, errors.Join(err, context.Cause(ctx))
		}
	}
}

// consumer reads the stream, and notes how old the events are.
type consumer struct {
	redis *redis.Client
	mu    sync.Mutex
	took  []time.Duration
}

func (c *consumer) read(ctx context.Context) error {
	for last := "0-0"; ctx.Err() == nil; {
		res, err := c.redis.XRead(ctx, &redis.XReadArgs{
			Streams: []string{stream, last}, Count: 1000, Block: 500 * time.Millisecond,
		}).Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		now := time.Now()
		c.mu.Lock()
		for _, s := range res {
			for _, m := range s.Messages {
				last = m.ID
				c.took = append(c.took, now.Sub(writtenAt(m.Values)))
			}
		}
		c.mu.Unlock()
	}
	return nil
}

// writtenAt is when the payload says that it was written.
func writtenAt(values map[string]any) time.Time {
	text, ok := values["data"].(string)
	if !ok {
		text, _ = values["payload"].(string) // watermill's
	}
	text, _, _ = strings.Cut(strings.TrimPrefix(text, `{"at": `), ",")
	ns, _ := strconv.ParseInt(text, 10, 64)
	return time.Unix(0, ns)
}

func (c *consumer) arrived(context.Context) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.took), nil
}

// take returns how old the events were that came since it was called last.
func (c *consumer) take() []time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	took := c.took
	c.took = nil
	return took
}

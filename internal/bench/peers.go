package bench

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/lab/local"
	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

// Peers measures several ways to get events out of Postgres, each as a process. lab/peers is its command.
type Peers struct {
	Options

	Peers []Peer
	// Stream is where every peer publishes to. The Redis is emptied for each measurement.
	Stream  string
	Lasts   time.Duration // of a load at a rate
	Rates   []float64     // transactions of one event per second; 0: as many as the writers can
	Backlog int           // events that exist when a peer starts; 0 omits this load
	Size    int           // bytes of an event's payload
	// Versions are those of the peers' libraries.
	Versions map[string]string
}

// Peer is one way to get events out of Postgres.
type Peer struct {
	Name, What string
	// Table is what the load writes into.
	Table *Table
	// Command returns the arguments of its process. It is nil for the load alone, with which the others that have the
	// same table are compared.
	Command func(p Place) []string
	// Slot is true if it reads a slot that it does not create, Bare if it publishes nothing.
	Slot, Bare bool
}

// Place has the addresses for a peer. Name is that of the slot, and of the relay.
type Place struct{ Postgres, Redis, Name string }

// Table is what a load writes into.
type Table struct {
	// Insert is the statement, with the text of the payload to be filled in; n is the number of the event.
	Insert  string
	Prepare func(ctx context.Context, pool *pgxpool.Pool) error
}

// InsertOutbox is the Insert of the outbox.
const InsertOutbox = insertEvent + "\nSELECT " + sqlID + ", '" + aggregateType + "', n::text, '" + eventType +
	"', (%s)::jsonb"

const peerNotes = "\nof Postgres: what it uses beyond the inserts (none: the inserts); the tax is the sum of all " +
	"three\nbehind: from the last commit to the last event, for as long again as the load at most; missing: had not " +
	"arrived by then"

// Run measures and prints the report.
func (c Peers) Run(ctx context.Context, config app.Config, o cli.IO) error {
	r := &report{Bench: "peers", notes: peerNotes, Settings: map[string]any{
		"seconds": c.Lasts.Seconds(), "size": c.Size, "writers": latencyWriters,
	}}
	for name, version := range c.Versions {
		r.Settings[name] = version
	}
	return benchmark(ctx, config, o, c.Options, Sink{}, r, func(b *session) (steps []step) {
		p := &peers{session: b, c: c}
		add := func(l peerLoad) {
			round := 0
			steps = append(steps, step{l.name, 0, func(ctx context.Context) error {
				round++
				return p.measure(ctx, l, round)
			}})
		}
		if c.Backlog > 0 {
			add(peerLoad{name: fmt.Sprintf("backlog of %d", c.Backlog), backlog: true})
		}
		for _, r := range c.Rates {
			name := fmt.Sprintf("%g/s", r)
			if r == 0 {
				name = fmt.Sprintf("%d writers", latencyWriters)
			}
			add(peerLoad{name: name, rate: r})
		}
		return steps
	})
}

// peerLoad is what every peer gets: a backlog that exists when it starts, or transactions at a rate.
type peerLoad struct {
	name    string
	backlog bool
	rate    float64
}

type peers struct {
	*session
	c Peers
}

// figures are the results of one measurement, by name.
type figures map[string]float64

// measure measures a load with every peer. Each round begins with another one.
func (p *peers) measure(ctx context.Context, l peerLoad, round int) error {
	found := map[string]figures{}
	for n := range p.c.Peers {
		peer := p.c.Peers[(n+round)%len(p.c.Peers)]
		if l.backlog && peer.Command == nil {
			continue // nothing to measure
		}
		if err := p.empty(ctx); err != nil {
			return err
		}
		err := p.in(ctx, func(ctx context.Context, s *scene) (err error) {
			found[peer.Name], err = (&peerScene{s, p.c, peer}).measure(ctx, l)
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", peer.Name, err)
		}
	}
	p.c.note(p.report, l, found)
	return nil
}

// empty empties Redis and its file, and makes Postgres write its buffers, so that no measurement pays for an earlier
// one.
func (p *peers) empty(ctx context.Context) error {
	err := errors.Join(p.redis.ConfigSet(ctx, "auto-aof-rewrite-percentage", "0").Err(), p.redis.FlushAll(ctx).Err(),
		p.redis.BgRewriteAOF(ctx).Err())
	for busy := true; busy && err == nil; {
		var info map[string]map[string]string
		info, err = p.redis.InfoMap(ctx, "persistence").Result()
		f := info["Persistence"]
		busy = f["aof_rewrite_in_progress"] != "0" || f["aof_rewrite_scheduled"] != "0"
		err = errors.Join(err, pause.For(ctx, 10*time.Millisecond))
	}
	if err == nil {
		_, err = p.admin.Exec(ctx, "CHECKPOINT")
	}
	return err
}

// note adds the figures of one round. It subtracts what Postgres uses for the inserts alone.
func (c Peers) note(r *report, l peerLoad, found map[string]figures) {
	for _, peer := range c.Peers {
		f, ok := found[peer.Name]
		if !ok {
			continue
		}
		list := &r.Limits
		if peer.Command != nil {
			list = &r.Results
			if !l.backlog {
				none := found[c.Peers[slices.IndexFunc(c.Peers, func(n Peer) bool {
					return n.Command == nil && n.Table == peer.Table
				})].Name]
				arrived := max(1, f["written"]-f["missing"])
				f["postgres_cpu_us"] -= none["postgres_cpu_us"] * f["written"] / arrived
				f["of_none_percent"] = 100 * f["per_second"] / none["per_second"]
			}
			f["tax_us"] = f["relay_cpu_us"] + f["postgres_cpu_us"] + f["redis_cpu_us"]
		}
		w := entry(list, l.name+", "+peer.Name, peer.What)
		for name, v := range f {
			if name != "written" {
				w.is(name, v)
			}
		}
	}
}

// peerScene is the measurement of one peer.
type peerScene struct {
	*scene
	c    Peers
	peer Peer
}

func (s *peerScene) measure(ctx context.Context, l peerLoad) (figures, error) {
	err := errors.Join(s.peer.Table.Prepare(ctx, s.pool), sql.Register(ctx, s.pool, s.config.RelayName),
		sql.SetDesired(ctx, s.pool, s.config.RelayName, outbox.ModeCDC))
	if s.peer.Slot && err == nil {
		_, err = s.pool.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", s.config.RelayName)
	}
	if err != nil {
		return nil, err
	}
	if l.backlog {
		return s.drain(ctx)
	}
	return s.follow(ctx, l.rate)
}

// start starts the peer, if it has a process, and returns a function that ends it. The returned context ends with the
// peer.
func (s *peerScene) start(ctx context.Context) (p *local.Process, during context.Context, stop func(), err error) {
	if s.peer.Command == nil {
		return nil, ctx, func() {}, nil
	}
	pg := s.servers.Postgres
	argv := s.peer.Command(Place{ // without the password: all users of the machine can read a command line
		fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", pg.Port, s.name), s.servers.RedisURL(),
		s.config.RelayName,
	})
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:noctx // stop ends it
	cmd.Env = append(os.Environ(), "PGPASSWORD="+pg.Password)
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

// payload is the text of an event's payload in SQL. It begins with the time of the insert, in nanoseconds.
func (s *peerScene) payload() string {
	pad := make([]byte, (s.c.Size-len(`{"at": 1234567890123456789, "pad": ""}`)+1)/2)
	_, _ = rand.Read(pad)
	return `'{"at": ' || (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint || ', "pad": "` +
		hex.EncodeToString(pad) + `"}'`
}

// insert makes the server write events from … to in one transaction.
func (s *peerScene) insert(ctx context.Context, from, to int) error {
	_, err := s.pool.Exec(ctx, fmt.Sprintf(s.peer.Table.Insert+" FROM generate_series(%d::bigint, %d) n", s.payload(),
		from, to))
	if err != nil {
		return fmt.Errorf("write events: %w", err)
	}
	return nil
}

// write makes the server write for the duration of a load, one event per transaction, and returns their number.
func (s *peerScene) write(ctx context.Context, rate float64) (n int, err error) {
	sleep := ""
	if rate > 0 {
		sleep = fmt.Sprintf(
			"PERFORM pg_sleep(greatest(0, n / %g::float8 - extract(epoch FROM clock_timestamp() - began)));", rate)
	}
	count := make([]int, latencyWriters)
	g, ctx := errgroup.WithContext(ctx)
	for w := range latencyWriters {
		g.Go(func() error {
			conn, err := s.pool.Acquire(ctx)
			if err != nil {
				return err
			}
			defer conn.Release()
			_, err = conn.Exec(ctx, fmt.Sprintf(`DO $do$ DECLARE began timestamptz := clock_timestamp(); n bigint := %d;
BEGIN LOOP %s EXIT WHEN clock_timestamp() >= began + interval '%d microseconds'; `+s.peer.Table.Insert+`; COMMIT;
n := n + %d; END LOOP; PERFORM set_config('peers.n', n::text, false); END $do$`, w+1, sleep, s.c.Lasts.Microseconds(),
				s.payload(), latencyWriters))
			if err != nil {
				return fmt.Errorf("write events: %w", err)
			}
			err = conn.QueryRow(ctx, "SELECT current_setting('peers.n')::int").Scan(&count[w])
			count[w] = (count[w] - w - 1) / latencyWriters
			return err
		})
	}
	err = g.Wait()
	for _, c := range count {
		n += c
	}
	s.progress.add(n)
	return n, err
}

// drain measures a peer that starts with a backlog, until all of it is in the stream.
func (s *peerScene) drain(ctx context.Context) (figures, error) {
	const chunk = 500
	for from := 1; from <= s.c.Backlog; from += chunk {
		if err := s.insert(ctx, from, min(from+chunk-1, s.c.Backlog)); err != nil {
			return nil, err
		}
	}
	used, began := s.usage(ctx), time.Now()
	p, ctx, stop, err := s.start(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	n, _, err := s.await(ctx, s.c.Backlog, 6*s.c.Lasts, func(ctx context.Context) (int, error) {
		n, err := s.redis.XLen(ctx, s.c.Stream).Result()
		return int(n), err
	})
	if err != nil {
		return nil, errors.Join(err, context.Cause(ctx))
	}
	s.progress.add(n)
	f := figures{"per_second": perSecond(n, began), "missing": float64(s.c.Backlog - n)}
	maps.Copy(f, costs(used, s.usage(ctx), p, 0, n))
	return f, nil
}

// follow measures a peer while events are written.
func (s *peerScene) follow(ctx context.Context, rate float64) (f figures, err error) {
	p, ctx, stop, err := s.start(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	var c ages
	err = during(ctx, func(ctx context.Context) error { return s.reading(ctx, s.c.Stream, c.add) },
		func(ctx context.Context) error {
			if err := s.ready(ctx, &c); err != nil {
				return err
			}
			before := 0.0
			if p != nil {
				before = p.CPU()
			}
			used, began := s.usage(ctx), time.Now()
			written, err := s.write(ctx, rate)
			if err != nil {
				return err
			}
			f = figures{"per_second": perSecond(written, began), "written": float64(written)}
			if p == nil {
				maps.Copy(f, costs(used, s.usage(ctx), nil, 0, written))
				return nil
			}
			n, behind, err := s.await(ctx, written, s.c.Lasts, c.arrived)
			maps.Copy(f, costs(used, s.usage(ctx), p, before, n))
			f["missing"], f["behind_ms"] = float64(written-n), millis(behind)
			if took := slices.Sorted(slices.Values(c.take())); len(took) > 0 {
				f["p50_ms"], f["p99_ms"] = millis(took[len(took)/2]), millis(took[len(took)*99/100])
			}
			return err
		})
	if err != nil {
		return nil, errors.Join(err, context.Cause(ctx))
	}
	return f, nil
}

// costs returns the processor time per event, also that of the peer since it had used before.
func costs(used, now usage, p *local.Process, before float64, n int) figures {
	each := 1e6 / float64(max(1, n))
	f := figures{
		"postgres_cpu_us": (now.postgres - used.postgres) * each, "redis_cpu_us": (now.redis - used.redis) * each,
	}
	if p != nil {
		f["relay_cpu_us"] = (p.CPU() - before) * each
	}
	return f
}

// ready waits until the peer streams: it has published an event, and its slot is in use.
func (s *peerScene) ready(ctx context.Context, c *ages) error {
	if s.peer.Command == nil {
		return nil
	}
	const patience = 30 * time.Second
	if err := s.insert(ctx, 0, 0); err != nil {
		return err
	}
	if _, _, err := s.await(ctx, 1, patience, c.arrived); err != nil {
		return err
	}
	if s.peer.Table.Insert == InsertOutbox {
		_, _, err := s.await(ctx, 1, patience, func(ctx context.Context) (n int, err error) {
			err = s.admin.QueryRow(ctx, "SELECT count(*) FROM pg_replication_slots WHERE database = $1 AND active",
				s.name).Scan(&n)
			return n, err
		})
		if err != nil {
			return fmt.Errorf("its slot: %w", err)
		}
	}
	err := pause.For(ctx, time.Second) // for other effects of a start
	c.take()
	return err
}

// await polls until there are n, for most at most, and returns the count and the time. A count of zero is an error. A
// peer that publishes nothing has all of them when Postgres has sent it everything that was written before.
func (s *peerScene) await(ctx context.Context, n int, most time.Duration, ask func(ctx context.Context) (int, error),
) (have int, took time.Duration, err error) {
	if s.peer.Bare {
		var end string
		if err := s.admin.QueryRow(ctx, "SELECT pg_current_wal_lsn()::text").Scan(&end); err != nil {
			return 0, 0, err
		}
		ask = func(ctx context.Context) (have int, err error) {
			err = s.admin.QueryRow(ctx, `SELECT count(*) * $3::int FROM pg_stat_replication JOIN pg_replication_slots
				ON pid = active_pid WHERE slot_name = $2 AND sent_lsn >= $1::text::pg_lsn`, end, s.config.RelayName, n).
				Scan(&have)
			return have, err
		}
	}
	for began := time.Now(); ; {
		have, err = ask(ctx)
		if took = time.Since(began); err != nil || have >= n || took > most {
			if err == nil && have == 0 {
				err = fmt.Errorf("nothing came through in %v", most)
			}
			return have, took, err
		}
		if err := pause.For(ctx, 5*time.Millisecond); err != nil {
			return have, took, err
		}
	}
}

// ages are the ages of the events that have arrived since the last take.
type ages struct {
	mu   sync.Mutex
	took []time.Duration
}

func (a *ages) add(m redis.XMessage) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.took = append(a.took, time.Since(writtenAt(m.Values)))
}

func (a *ages) arrived(context.Context) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.took), nil
}

// take returns the ages, and removes them.
func (a *ages) take() (took []time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	took, a.took = a.took, nil
	return took
}

func writtenAt(values map[string]any) time.Time {
	text, ok := values["data"].(string)
	if !ok {
		text, _ = values["payload"].(string) // watermill's
	}
	text, _, _ = strings.Cut(strings.TrimPrefix(text, `{"at": `), ",")
	ns, _ := strconv.ParseInt(text, 10, 64)
	return time.Unix(0, ns)
}

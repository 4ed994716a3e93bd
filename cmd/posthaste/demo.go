package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/consumer"
	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/local"
	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sql"
)

type demoCmd struct {
	Once     bool          `help:"Print a summary and exit instead of staying until Ctrl-C."`
	Rate     int           `help:"Orders per second under load." default:"200"`
	Duration time.Duration `help:"How long the load lasts." default:"9s"`
	PGBin    string        `name:"pg-bin" help:"Folder of the Postgres server's programs." env:"POSTHASTE_PG_BIN"`
	RedisBin string        `help:"The redis-server program." env:"POSTHASTE_REDIS_BIN"`
}

// demo is everything a demo runs.
type demo struct {
	out    io.Writer
	log    *slog.Logger
	config app.Config
	dir    string
	pg     *local.Postgres
	rd     *local.Redis
	pool   *pgxpool.Pool
	client *redis.Client
	serve  *app.Serve
	relay  *app.Relay
	user   uuid.UUID

	neighbours neighbours

	posted atomic.Int64
	mu     sync.Mutex
	sent   map[string]time.Time // order id -> when its POST was sent; only orders that were answered 201
	seen   map[string]time.Time // order id -> when the consumer had it
	modes  map[outbox.Mode][]time.Duration
	mode   atomic.Value // outbox.Mode, as of the last look
}

// Run starts servers of its own, the API, the relay and a consumer, and shows events arriving.
func (c demoCmd) Run(ctx context.Context, e *env) (err error) {
	if c.Rate < 1 || c.Rate > 5000 || c.Duration < 3*time.Second {
		return cli.Usage("--rate must be 1 to 5000, --duration at least 3s")
	}
	d := &demo{
		out: e.Stdout, config: e.config, user: uuid.New(), sent: map[string]time.Time{}, seen: map[string]time.Time{}, modes: map[outbox.Mode][]time.Duration{},
		log: slog.New(slog.NewTextHandler(e.Stderr, &slog.HandlerOptions{Level: max(e.config.LogLevel, slog.LevelWarn)})),
	}
	d.mode.Store(outbox.ModeStandby)
	defer d.cleanup()
	if err := d.servers(ctx, c.PGBin, c.RedisBin); err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	gctx, stop := context.WithCancel(gctx)
	defer func() {
		stop()
		// What a process ended with says more than that the rest was cancelled for it.
		if werr := g.Wait(); werr != nil && (err == nil || errors.Is(err, context.Canceled)) && !errors.Is(werr, context.Canceled) {
			err = werr
		}
	}()
	if err := d.processes(gctx, g); err != nil {
		return err
	}
	if err := d.story(gctx, c); err != nil {
		return err
	}
	if c.Once {
		return nil
	}
	fmt.Fprintf(d.out, "\nRunning until Ctrl-C. Try:\n  curl -s %s/relay\n  curl -s -X PUT %s/relay/mode -d '{\"mode\":\"poll\"}'\n  curl -s %s/metrics | grep ^outbox_\n",
		d.adminURL(), d.adminURL(), d.adminURL())
	fmt.Fprintf(d.out, "  curl -s -X POST http://%s/orders -H 'Content-Type: application/json' -H 'Idempotency-Key: %s' -d '{\"user_id\":\"%s\",\"amount\":1999,\"currency\":\"USD\"}'\n",
		d.serve.PublicAddr(), uuid.New(), d.user)
	<-gctx.Done()
	return nil
}

func (d *demo) adminURL() string { return "http://" + d.relay.AdminAddr().String() }

// servers starts Postgres and Redis on free ports under one temporary folder.
func (d *demo) servers(ctx context.Context, pgBin, redisBin string) error {
	bin, err := local.PostgresBin(ctx, pgBin)
	if err != nil {
		return err
	}
	redisPath, err := local.RedisBin(redisBin)
	if err != nil {
		return err
	}
	if d.dir, err = os.MkdirTemp("", "posthaste-demo-"); err != nil {
		return err
	}
	// Postgres may have to run as another user, who must be able to pass through.
	if err := os.Chmod(d.dir, 0o711); err != nil { //nolint:gosec // pass through only
		return err
	}
	folders := map[string]string{"postgres": filepath.Join(d.dir, "postgres"), "redis": filepath.Join(d.dir, "redis")}
	for _, f := range folders {
		if err := os.Mkdir(f, 0o700); err != nil {
			return err
		}
	}
	began := time.Now()
	if d.pg, err = local.StartPostgres(ctx, bin, folders["postgres"], "max_slot_wal_keep_size=4GB"); err != nil {
		return err
	}
	if d.rd, err = local.StartRedis(ctx, redisPath, folders["redis"]); err != nil {
		return err
	}
	d.config.PostgresURL, d.config.RedisURL = d.pg.URL("postgres"), d.rd.URL()
	d.config.HTTPAddr, d.config.AdminAddr = "127.0.0.1:0", "127.0.0.1:0"
	fmt.Fprintf(d.out, "Postgres on port %d and Redis on port %d, started in %v\n", d.pg.Port, d.rd.Port, time.Since(began).Round(10*time.Millisecond))
	if _, err := sql.Migrate(ctx, d.config.PostgresURL, d.config.Schema, d.log); err != nil {
		return err
	}
	poolConfig, err := sql.PoolConfig(d.config.PostgresURL, d.config.Schema, "demo")
	if err != nil {
		return err
	}
	if d.pool, err = pgxpool.NewWithConfig(ctx, poolConfig); err != nil {
		return err
	}
	d.client, err = app.ReaderClient(d.config.RedisURL)
	return err
}

// processes starts the API, the relay and a consumer.
func (d *demo) processes(ctx context.Context, g *errgroup.Group) (err error) {
	if d.serve, err = app.NewServe(ctx, d.config, d.log); err != nil {
		return err
	}
	if d.relay, err = app.NewRelay(ctx, d.config, d.log); err != nil {
		return err
	}
	cons, err := consumer.New(consumer.Options{
		Client: d.client, Group: "demo", Streams: []string{d.config.StreamPrefix + "order"}, Handler: d.arrived, DrainTimeout: time.Second, Log: d.log,
	})
	if err != nil {
		return err
	}
	g.Go(func() error { return d.serve.Run(ctx) })
	g.Go(func() error { return d.relay.Run(ctx) })
	g.Go(func() error { return cons.Run(ctx) })
	g.Go(func() error { return d.watchMode(ctx) })
	if err := d.neighbours.start(ctx, g, d); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "API on http://%s, relay and its metrics on %s\nConsole: %s/console/\n\n", d.serve.PublicAddr(), d.adminURL(), d.adminURL())
	return nil
}

// arrived is the consumer's handler.
func (d *demo) arrived(_ context.Context, ev consumer.Event) error {
	now := time.Now()
	mode, _ := d.mode.Load().(outbox.Mode)
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, again := d.seen[ev.Subject]; again {
		return nil // the streams are counted at the end; this is only the clock
	}
	d.seen[ev.Subject] = now
	if at, ok := d.sent[ev.Subject]; ok {
		d.modes[mode] = append(d.modes[mode], now.Sub(at))
	}
	return nil
}

func (d *demo) watchMode(ctx context.Context) error {
	for ctx.Err() == nil {
		d.mode.Store(d.relay.Status().Mode)
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// story is what the demo shows.
func (d *demo) story(ctx context.Context, c demoCmd) error {
	if err := d.until(ctx, 30*time.Second, "the stream to open", func() bool { return d.mode.Load() == outbox.ModeCDC }); err != nil {
		return err
	}
	fmt.Fprintln(d.out, "Orders, one by one:")
	for range 5 {
		if err := d.showOne(ctx); err != nil {
			return err
		}
	}
	if err := d.showReplay(ctx); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\nUnder load, %d orders/s for %v, switching to polling and back:\n", c.Rate, c.Duration)
	if err := d.load(ctx, c); err != nil {
		return err
	}
	if err := d.until(ctx, 30*time.Second, "every order to arrive", func() bool { return d.missing() == 0 }); err != nil {
		fmt.Fprintln(d.out, err)
	}
	if err := d.neighbours.report(ctx, d, len(d.sent)); err != nil {
		return err
	}
	return d.summary(ctx)
}

// until waits for cond, and says what it waited for if it does not come true.
func (d *demo) until(ctx context.Context, within time.Duration, what string, cond func() bool) error {
	deadline := time.Now().Add(within)
	for !cond() {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(deadline) {
			bad, degraded := d.relay.Health().Reasons, d.relay.Health().Degraded
			return fmt.Errorf("waited %v for %s; the relay says: %v %v", within, what, bad, degraded)
		}
		time.Sleep(2 * time.Millisecond)
	}
	return nil
}

// post places an order and returns its id and whether the answer was a replay.
func (d *demo) post(ctx context.Context, key string) (id string, replayed bool, err error) {
	body := fmt.Appendf(nil, `{"user_id":%q,"amount":1999,"currency":"USD"}`, d.user)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+d.serve.PublicAddr().String()+"/orders", bytes.NewReader(body))
	if err != nil {
		return "", false, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	at := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", false, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return "", false, err
	}
	var order struct{ ID string }
	if err := json.Unmarshal(answer, &order); err != nil || resp.StatusCode != http.StatusCreated {
		return "", false, fmt.Errorf("POST /orders: status %d: %s", resp.StatusCode, answer)
	}
	replayed = resp.Header.Get("Idempotent-Replayed") == "true"
	if !replayed {
		d.sentAt(order.ID, at)
		d.posted.Add(1)
	}
	return order.ID, replayed, nil
}

// sentAt notes a placed order; its event may have arrived before the answer did.
func (d *demo) sentAt(id string, at time.Time) {
	mode, _ := d.mode.Load().(outbox.Mode)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sent[id] = at
	if seen, ok := d.seen[id]; ok {
		d.modes[mode] = append(d.modes[mode], seen.Sub(at))
	}
}

func (d *demo) missing() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for id := range d.sent {
		if _, ok := d.seen[id]; !ok {
			n++
		}
	}
	return n
}

func (d *demo) latency(id string) (time.Duration, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	seen, ok := d.seen[id]
	return seen.Sub(d.sent[id]), ok
}

func (d *demo) showOne(ctx context.Context) error {
	id, _, err := d.post(ctx, uuid.NewString())
	if err != nil {
		return err
	}
	if err := d.until(ctx, 10*time.Second, "the order's event", func() bool { _, ok := d.latency(id); return ok }); err != nil {
		return err
	}
	took, _ := d.latency(id)
	fmt.Fprintf(d.out, "  order %s: its event was with the consumer %.1f ms after the POST was sent\n", id, float64(took.Microseconds())/1000)
	return nil
}

func (d *demo) showReplay(ctx context.Context) error {
	key := uuid.NewString()
	first, _, err := d.post(ctx, key)
	if err != nil {
		return err
	}
	second, replayed, err := d.post(ctx, key)
	if err != nil {
		return err
	}
	if first != second || !replayed {
		return fmt.Errorf("the same key gave orders %s and %s", first, second)
	}
	fmt.Fprintf(d.out, "  order %s: posted twice with one key, placed once\n", first)
	return nil
}

// load posts orders at the rate, and toggles the mode at a third and two thirds of the time.
func (d *demo) load(ctx context.Context, c demoCmd) error {
	lctx, cancel := context.WithTimeout(ctx, c.Duration)
	defer cancel()
	g, gctx := errgroup.WithContext(ctx)
	jobs := make(chan struct{}, c.Rate)
	for range 16 {
		g.Go(func() error {
			for range jobs {
				if _, _, err := d.post(gctx, uuid.NewString()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	g.Go(func() error {
		defer close(jobs)
		t := time.NewTicker(time.Second / time.Duration(c.Rate))
		defer t.Stop()
		for {
			select {
			case <-lctx.Done():
				return nil
			case <-gctx.Done():
				return nil
			case <-t.C:
				select {
				case jobs <- struct{}{}:
				default: // the API is slower than the rate: post what it takes
				}
			}
		}
	})
	g.Go(func() error { return d.toggle(lctx, c.Duration) })
	g.Go(func() error { d.progress(lctx); return nil })
	return g.Wait()
}

func (d *demo) toggle(ctx context.Context, total time.Duration) error {
	for _, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeAuto} {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(total / 3):
		}
		if err := ops.SetMode(ctx, d.pool, d.config.RelayName, mode); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

func (d *demo) progress(ctx context.Context) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	last := int64(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		n := d.posted.Load()
		fmt.Fprintf(d.out, "  %-4s  %5d orders/s, %d placed, %d on their way\n", d.mode.Load(), n-last, n, d.missing())
		last = n
	}
}

// summary counts what is in the stream against what was placed, and fails if they differ.
func (d *demo) summary(ctx context.Context) error {
	entries, err := d.client.XRange(ctx, d.config.StreamPrefix+"order", "-", "+").Result()
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, m := range entries {
		if subject, ok := m.Values["subject"].(string); ok {
			count[subject]++
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	lost, duplicates := 0, 0
	for id := range d.sent {
		if count[id] == 0 {
			lost++
		}
	}
	for _, n := range count {
		duplicates += n - 1
	}
	fmt.Fprintln(d.out, "\nFrom POST to consumer:")
	for _, mode := range []outbox.Mode{outbox.ModeCDC, outbox.ModePoll} {
		if l := d.modes[mode]; len(l) > 0 {
			slices.Sort(l)
			fmt.Fprintf(d.out, "  %-4s  p50 %6.1f ms, p99 %6.1f ms, %d events\n", mode, ms(l[len(l)/2]), ms(l[len(l)*99/100]), len(l))
		}
	}
	fmt.Fprintf(d.out, "\n%d orders placed, %d events in the stream: lost %d, duplicates %d\n", len(d.sent), len(entries), lost, duplicates)
	if lost > 0 || duplicates > 0 {
		return errors.New("the demo found events lost or duplicated: please report this with the relay's log")
	}
	return nil
}

func ms(t time.Duration) float64 { return float64(t.Microseconds()) / 1000 }

// cleanup stops the servers and removes their folder.
func (d *demo) cleanup() {
	if d.client != nil {
		_ = d.client.Close()
	}
	if d.pool != nil {
		d.pool.Close()
	}
	if d.rd != nil {
		_ = d.rd.Kill()
	}
	if d.pg != nil {
		_ = d.pg.Stop("immediate")
	}
	if d.dir != "" {
		_ = os.RemoveAll(d.dir)
	}
}

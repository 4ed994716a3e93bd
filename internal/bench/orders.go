package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/api"
	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/outbox"
	"posthaste/sql"
)

// Orders measures POST /orders.
type Orders struct {
	Options

	Concurrency int           `help:"Clients, each of which posts again as soon as it is answered." default:"16"`
	Rate        float64       `default:"0"`
	Duration    time.Duration `help:"How long each measurement lasts." default:"5s"`
	Repeat      int           `help:"Requests of a hundred that repeat an earlier key." default:"10"`
}

// Run measures and prints the report. It returns a usage error for options that cannot be measured, and ErrFound if
// the result is wrong.
func (c Orders) Run(ctx context.Context, config app.Config, o cli.IO) error {
	if c.Concurrency < 1 || c.Concurrency > 1000 || c.Rate < 0 || c.Rate > 1e6 || c.Duration <= 0 || c.Repeat < 0 ||
		c.Repeat > 50 {
		return cli.Usage("--concurrency must be from 1 to 1000, --rate not negative, --duration positive, --repeat " +
			"from 0 to 50")
	}
	r := &report{
		Bench: "orders", Settings: map[string]any{
			"concurrency": c.Concurrency, "rate": c.Rate, "duration": c.Duration.String(), "repeat_percent": c.Repeat,
		},
	}
	return benchmark(ctx, config, o, c.Options, Sink{}, r, func(b *session) []step {
		m := &orders{session: b, c: c, user: uuid.New()}
		total := int(c.Rate * (c.Duration + loadWarm).Seconds())
		return []step{
			{"empty handler", total, m.empty},
			{"bare transaction", total, m.transaction},
			{"without the guard", total, func(ctx context.Context) error { return m.post(ctx, false) }},
			{"with the guard", total, func(ctx context.Context) error { return m.post(ctx, true) }},
		}
	})
}

type orders struct {
	*session
	c    Orders
	user uuid.UUID
	// answered is 1 + the number of the last answered key; 0 before the first.
	answered atomic.Int64
}

func (o *orders) load(do func(ctx context.Context, n int) error) load {
	return load{
		workers: o.c.Concurrency, rate: o.c.Rate, warm: loadWarm, lasts: o.c.Duration,
		do: func(ctx context.Context, n int, _ time.Time) error {
			o.progress.add(1)
			return do(ctx, n)
		},
	}
}

func (o *orders) note(w *row, took []time.Duration, calls int, used, now usage) {
	w.is("per_second", float64(len(took))/o.c.Duration.Seconds())
	w.spread(took)
	used.note(w, now, calls)
}

// pick returns the number of request n's key: for Repeat percent of requests that of the last answered key.
func (o *orders) pick(n int) (key int, repeated bool) {
	if last := o.answered.Load(); last > 0 && n%100 < o.c.Repeat {
		return int(last) - 1, true
	}
	return n, false
}

func (o *orders) key(n int) string { return fmt.Sprintf("bench-%s-%012d", o.name, n) }

// answer is a body like that of the API, for measurements without the API.
func (o *orders) answer() []byte {
	const order = `{"id":%q,"user_id":%q,"amount":1999,"currency":"USD","status":"PENDING",` +
		`"created_at":"2026-01-02T03:04:05.000000Z"}`
	return fmt.Appendf(nil, order, o.user, o.user)
}

// empty measures HTTP alone: gin, and a handler that answers at once.
func (o *orders) empty(ctx context.Context) error {
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	answer := o.answer()
	engine.POST("/orders", func(c *gin.Context) { c.Data(http.StatusCreated, "application/json", answer) })
	used := o.usage(ctx)
	took, calls, err := o.posting(ctx, engine, func(*http.Response, bool) error { return nil })
	if err != nil {
		return err
	}
	o.note(o.report.limit("empty", "POST to an empty gin handler"), took, calls, used, o.usage(ctx))
	return nil
}

// posting serves h and posts orders to it. check gets every answer, and whether its key was repeated.
func (o *orders) posting(ctx context.Context, h http.Handler,
	check func(resp *http.Response, repeated bool) error,
) (took []time.Duration, calls int, err error) {
	l, err := app.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		return nil, 0, err
	}
	o.answered.Store(0)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: o.c.Concurrency}}
	body := fmt.Appendf(nil, `{"user_id":%q,"amount":1999,"currency":"USD"}`, o.user)
	url := "http://" + l.Addr().String() + "/orders"
	err = during(ctx, func(ctx context.Context) error {
		return app.ServeHTTP(ctx, api.NewHTTPServer(h), l, time.Second)
	}, func(ctx context.Context) (err error) {
		defer client.CloseIdleConnections()
		took, calls, err = o.load(func(ctx context.Context, n int) error {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
			if err != nil {
				return err
			}
			key, repeated := o.pick(n)
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Idempotency-Key", o.key(key))
			resp, err := client.Do(req)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			if _, err := io.Copy(io.Discard, resp.Body); err != nil {
				return err
			}
			if resp.StatusCode != http.StatusCreated {
				return fmt.Errorf("POST /orders: status %d", resp.StatusCode)
			}
			if !repeated {
				o.answered.Store(int64(n) + 1)
			}
			return check(resp, repeated)
		}).run(ctx)
		return err
	})
	return took, calls, err
}

// transaction measures the statement that writes an order and its event: no HTTP, no guard, no repetitions.
func (o *orders) transaction(ctx context.Context) error {
	return o.in(ctx, func(ctx context.Context, s *scene) error {
		return s.asAPI(ctx, func(pool *pgxpool.Pool) error {
			payload := o.answer()
			used := o.usage(ctx)
			took, calls, err := o.load(func(ctx context.Context, n int) error {
				id, err := uuid.NewV7()
				if err != nil {
					return err
				}
				order := &sql.Order{
					ID: id, UserID: o.user, Key: api.OrderKey(o.user, o.key(n)), Fingerprint: []byte{1}, Amount: 1999,
					Currency: "USD", Status: sql.OrderPending, CreatedAt: time.Now(),
				}
				_, err = sql.PlaceOrder(ctx, pool, order, &outbox.Event{
					ID: eventID(n), AggregateType: "order",
					AggregateID: id.String(), Type: "order.created", Payload: payload,
				})
				return err
			}).run(ctx)
			if err != nil {
				return err
			}
			o.note(o.report.limit("transaction", "the statement with the order and its event, without HTTP"), took,
				calls, used, o.usage(ctx))
			return nil
		})
	})
}

func (o *orders) post(ctx context.Context, guarded bool) error {
	return o.in(ctx, func(ctx context.Context, s *scene) error {
		return s.asAPI(ctx, func(pool *pgxpool.Pool) error {
			options := api.Options{Pool: pool}
			w := o.report.result("unguarded", "POST /orders with Postgres as the only guard")
			if guarded {
				w = o.report.result("guarded", "POST /orders")
				client, err := s.config.GuardClient(ctx, s.config.RedisURL)
				if err != nil {
					return err
				}
				defer client.Close()
				options.Redis = client
			}
			server, err := api.New(options)
			if err != nil {
				return err
			}
			var replayed atomic.Int64
			used := o.usage(ctx)
			took, calls, err := o.posting(ctx, server.Public(), func(resp *http.Response, repeated bool) error {
				if again := resp.Header.Get("Idempotent-Replayed"); again != strconv.FormatBool(repeated) {
					return fmt.Errorf("POST /orders: Idempotent-Replayed is %q, and the key was repeated: %v", again,
						repeated)
				}
				if repeated {
					replayed.Add(1)
				}
				return nil
			})
			if guarded {
				err = errors.Join(err, o.forget(ctx, pool, calls))
			}
			if err != nil {
				return err
			}
			o.note(w, took, calls, used, o.usage(ctx))
			return o.verdict(ctx, s, w, calls, int(replayed.Load()))
		})
	})
}

// The guard's records would otherwise stay for a day.
func (o *orders) forget(ctx context.Context, pool *pgxpool.Pool, calls int) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	incarnation, _, err := sql.ReadIncarnation(ctx, pool)
	if err != nil {
		return err
	}
	const chunk = 1000
	// Calls in flight when an error ended the run are not among calls.
	for from := 0; from < calls+o.c.Concurrency; from += chunk {
		keys := make([]string, 0, chunk)
		for n := from; n < from+chunk; n++ {
			keys = append(keys, api.OrderKey(o.user, o.key(n)).In(incarnation).String())
		}
		if err := unlink(ctx, o.redis, keys); err != nil {
			return fmt.Errorf("remove the guard's records: %w", err)
		}
	}
	return nil
}

func (o *orders) verdict(ctx context.Context, s *scene, w *row, calls, replayed int) error {
	c := check{Committed: calls - replayed, Replayed: replayed}
	var distinct int
	err := s.pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM outbox),
		(SELECT count(DISTINCT aggregate_id) FROM outbox WHERE aggregate_id IN (SELECT id::text FROM orders))`).
		Scan(&c.Found, &c.Recorded, &distinct)
	if err != nil {
		return err
	}
	c.Lost, c.Repeated = max(0, c.Committed-distinct), max(0, c.Recorded-distinct)
	w.checked(c)
	lowest := o.report.against(w, "per_second", "empty", "transaction")
	switch busy := w.median("busy_percent"); {
	case o.c.Rate > 0:
		clear(w.Ratios) // the rate is an option
		for _, q := range []string{"p50", "p99"} {
			w.Ratios[q+" of transaction"] = w.median(q+"_ms") / o.report.find("transaction").median(q+"_ms")
		}
		w.Bound = "the requested rate"
	case busy >= 90:
		w.Bound = fmt.Sprintf("the processors (%.0f %% busy); the lower limit is %s", busy, lowest)
	default:
		w.Bound = lowest
	}
	return nil
}

package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"posthaste/internal/lab/local"
	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

func (d *demo) story(ctx context.Context, c Options) error {
	streams := func() bool { return d.mode.Load() == outbox.ModeCDC }
	if err := d.until(ctx, 30*time.Second, "the stream to open", streams); err != nil {
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
	fmt.Fprintf(d.out, "\nUnder load, %d orders/s for %v, switching to poll and back:\n", c.Rate, c.Duration)
	if err := d.load(ctx, c); err != nil {
		return err
	}
	arrived := func() bool { return d.missing() == 0 }
	if err := d.until(ctx, 30*time.Second, "every order to arrive", arrived); err != nil {
		fmt.Fprintln(d.out, err)
	}
	return d.summary(ctx)
}

// until waits for cond. Its error names what it waited for.
func (d *demo) until(ctx context.Context, within time.Duration, what string, cond func() bool) error {
	deadline := time.Now().Add(within)
	for !cond() {
		if time.Now().After(deadline) {
			h := d.relay.Health()
			return fmt.Errorf("waited %v for %s; the relay says: %v %v", within, what, h.Reasons, h.Degraded)
		}
		if err := pause.For(ctx, 2*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// post places an order and returns its id and whether the answer was a replay.
func (d *demo) post(ctx context.Context, key string) (id string, replayed bool, err error) {
	at := time.Now()
	a, err := local.Request(ctx, http.MethodPost, "http://"+d.serve.PublicAddr().String()+"/orders",
		fmt.Sprintf(`{"user_id":%q,"amount":1999,"currency":"USD"}`, d.user), "Idempotency-Key", key)
	if err != nil {
		return "", false, err
	}
	var order struct{ ID string }
	if err := json.Unmarshal(a.Body, &order); err != nil || a.Status != http.StatusCreated {
		return "", false, fmt.Errorf("POST /orders: status %d: %s", a.Status, a.Body)
	}
	replayed = a.Header.Get("Idempotent-Replayed") == "true"
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
	var took time.Duration
	err = d.until(ctx, 10*time.Second, "the order's event", func() (arrived bool) {
		took, arrived = d.latency(id)
		return arrived
	})
	if err == nil {
		fmt.Fprintf(d.out, "  order %s: its event was with the consumer %.1f ms after the POST was sent\n", id,
			ms(took))
	}
	return err
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
func (d *demo) load(ctx context.Context, c Options) error {
	lctx, cancel := context.WithTimeout(ctx, c.Duration)
	defer cancel()
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.toggle(lctx, c.Duration) })
	g.Go(func() error { d.progress(lctx); return nil })
	clients, cctx := errgroup.WithContext(gctx)
	clients.SetLimit(16)
	t := time.NewTicker(time.Second / time.Duration(c.Rate))
	defer t.Stop()
	for lctx.Err() == nil && cctx.Err() == nil {
		select {
		case <-lctx.Done():
		case <-cctx.Done():
		case <-t.C:
			clients.TryGo(func() error { // if the API is slower than the rate, it gets what it takes
				_, _, err := d.post(cctx, uuid.NewString())
				return err
			})
		}
	}
	err := clients.Wait()
	cancel()
	return errors.Join(err, g.Wait())
}

func (d *demo) toggle(ctx context.Context, total time.Duration) error {
	for _, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeAuto} {
		if pause.For(ctx, total/3) != nil {
			return nil
		}
		if err := sql.SetDesired(ctx, d.pool, d.config.RelayName, mode); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

func (d *demo) progress(ctx context.Context) {
	for last := int64(0); pause.For(ctx, time.Second) == nil; {
		n := d.posted.Load()
		fmt.Fprintf(d.out, "  %-4s  %5d orders/s, %d placed, %d on their way\n", d.mode.Load(), n-last, n, d.missing())
		last = n
	}
}

// summary compares the stream with the placed orders, and fails if they differ.
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
			fmt.Fprintf(d.out, "  %-4s  p50 %6.1f ms, p99 %6.1f ms, %d events\n", mode, ms(l[len(l)/2]),
				ms(l[len(l)*99/100]), len(l))
		}
	}
	fmt.Fprintf(d.out, "\n%d orders placed, %d events in the stream: lost %d, duplicates %d\n", len(d.sent),
		len(entries), lost, duplicates)
	if lost > 0 || duplicates > 0 {
		return errors.New("the demo found events lost or duplicated: please report this with the relay's log")
	}
	return nil
}

func ms(t time.Duration) float64 { return float64(t.Microseconds()) / 1000 }

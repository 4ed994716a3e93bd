package cdc

import (
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/testenv"
	"posthaste/outbox"
)

// BenchmarkStream reads 200,000 transactions of one row each through a receiver that only confirms; each iteration
// reads them all. events/s is the rate from START_REPLICATION to the last row, cpu-s the processor time of this
// process.
//
//	go test -run xxx -bench Stream -benchtime 1x ./cdc
func BenchmarkStream(b *testing.B) {
	const n = 200_000
	srv := testenv.NewServer(b, "synchronous_commit=off")
	d := srv.Database(b)
	e := prepare(b, d)
	e.ensure(b)
	d.Exec(b, fmt.Sprintf(`DO $$ BEGIN FOR i IN 1..%d LOOP
		INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (gen_random_uuid(), 'order', i::text, 'order.created', 
			jsonb_build_object('id', gen_random_uuid(), 'amount', i, 'note', repeat('x', 150)));
		COMMIT; END LOOP; END $$`, n))
	d.Exec(b, "SELECT pg_switch_wal()")
	u, err := url.Parse(d.URL)
	if err != nil {
		b.Fatal(err)
	}
	socket := fmt.Sprintf("postgres://%s@/%s?host=%s&port=%s", u.User, d.Name, url.QueryEscape(filepath.Clean(srv.Dir)),
		u.Port())
	for name, dsn := range map[string]string{"tcp": d.URL, "unix": socket} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				measure(b, e.reader(b, func(o *ReaderOptions) { o.URL = dsn }), n)
			}
		})
	}
}

// measure reads n events without settling any, so that the next measurement finds them again.
func measure(b *testing.B, r *Reader, n int) {
	b.Helper()
	out := make(chan outbox.Chunk, 8)
	cpu, begin := cpuTime(b), time.Now()
	done, stop := goRun(b, r, out)
	events, chunks := 0, 0
	for events < n {
		chunk := <-out
		chunks++
		for i := range chunk.Rows {
			if !chunk.Rows[i].Marker() {
				events++
			}
		}
	}
	took := time.Since(begin)
	b.ReportMetric(float64(n)/took.Seconds(), "events/s")
	b.ReportMetric((cpuTime(b) - cpu).Seconds(), "cpu-s")
	b.ReportMetric(float64(n)/float64(chunks), "events/chunk")
	stop()
	if err := <-done; err == nil || !strings.Contains(err.Error(), "canceled") {
		b.Fatal(err)
	}
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkLatency is the time from the commit of one event to its arrival, on an idle stream.
func BenchmarkLatency(b *testing.B) {
	e := setup(b)
	r := e.reader(b)
	out := make(chan outbox.Chunk, 8)
	_, _ = goRun(b, r, out)
	conn, err := e.db.Pool.Acquire(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Release()
	for b.Loop() {
		if _, err := conn.Exec(b.Context(), insertOne, "x"); err != nil {
			b.Fatal(err)
		}
		for arrived := false; !arrived; {
			chunk := <-out
			arrived = len(chunk.Rows) > 0
			if arrived {
				r.Settled(chunk.Rows[len(chunk.Rows)-1].End)
			}
		}
	}
}

// BenchmarkDecode is the decoder alone: BEGIN, one row of 300 bytes, COMMIT.
func BenchmarkDecode(b *testing.B) {
	d := newDecoder("public", "outbox")
	if _, err := d.decode(relationMsg(1, "public", "outbox", allColumns...)); err != nil {
		b.Fatal(err)
	}
	msgs := [][]byte{begin(100), goodRow(1).Bytes(), end(100)}
	b.ReportAllocs()
	for b.Loop() {
		for _, m := range msgs {
			if _, err := d.decode(m); err != nil {
				b.Fatal(err)
			}
		}
	}
}

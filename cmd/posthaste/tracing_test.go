package main

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
)

// span is one span as received by a collector.
type span struct {
	service, name, trace, id, parent string
	kind                             tracepb.Span_SpanKind
	start, end                       uint64
	text                             string // the whole span with its resource
}

// otlp is a collector. It implements the HTTP form of the protocol and keeps the spans.
type otlp struct {
	url   string
	dials atomic.Int64
	mu    sync.Mutex
	list  []span
	err   error
}

func newCollector(t *testing.T) *otlp {
	t.Helper()
	c := &otlp{}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := c.take(r); err != nil {
			c.mu.Lock()
			c.err = errors.Join(c.err, err)
			c.mu.Unlock()
			w.WriteHeader(http.StatusBadRequest)
		}
	}))
	s.Config.ConnState = func(_ net.Conn, st http.ConnState) {
		if st == http.StateNew {
			c.dials.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	c.url = s.URL
	return c
}

func (c *otlp) take(r *http.Request) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	var req collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(body, &req); err != nil || r.URL.Path != "/v1/traces" {
		return fmt.Errorf("%s: %w", r.URL.Path, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range req.GetResourceSpans() {
		service := ""
		for _, a := range rs.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				service = a.GetValue().GetStringValue()
			}
		}
		for _, ss := range rs.GetScopeSpans() {
			for _, s := range ss.GetSpans() {
				c.list = append(c.list, span{
					service: service, name: s.GetName(), trace: hex.EncodeToString(s.GetTraceId()),
					id:     hex.EncodeToString(s.GetSpanId()),
					parent: hex.EncodeToString(s.GetParentSpanId()), kind: s.GetKind(), start: s.GetStartTimeUnixNano(),
					end:  s.GetEndTimeUnixNano(),
					text: prototext.Format(rs.GetResource()) + prototext.Format(s),
				})
			}
		}
	}
	return nil
}

// spans returns the received spans of a trace, or all spans if trace is "".
func (c *otlp) spans(t *testing.T, trace string) []span {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		t.Fatal(c.err)
	}
	var out []span
	for _, s := range c.list {
		if trace == "" || s.trace == trace {
			out = append(out, s)
		}
	}
	return out
}

// tracedOrder is an order placed with a trace context, which may be "".
type tracedOrder struct{ id, key, user string }

func (w *world) placeTraced(api *child, traceparent string) tracedOrder {
	w.t.Helper()
	o := tracedOrder{key: uuid.NewString(), user: uuid.NewString()}
	body := fmt.Sprintf(`{"user_id":%q,"amount":314159265,"currency":"USD"}`, o.user)
	headers := []string{"Idempotency-Key", strconv.Quote(o.key)}
	if traceparent != "" {
		headers = append(headers, "Traceparent", traceparent)
	}
	a, err := testenv.Request(w.t.Context(), http.MethodPost, api.http+"/orders", body, headers...)
	var answer struct{ ID string }
	if err != nil || a.Status != http.StatusCreated || json.Unmarshal(a.Body, &answer) != nil {
		w.t.Fatalf("status %d, %v: %s", a.Status, err, a.Body)
	}
	o.id = answer.ID
	return o
}

// carried returns the trace context of an order's event in the stream, and fails unless its row had the same.
func (w *world) carried(order string) string {
	w.t.Helper()
	var row, entry string
	testenv.Eventually(w.t, 20*time.Second, func() error {
		return w.db.Pool.QueryRow(w.t.Context(),
			"SELECT coalesce(headers->>'traceparent', '') FROM outbox_history WHERE aggregate_id = $1",
			order).Scan(&row)
	})
	for _, e := range rawEntries(w.t, w, "outbox.order") {
		if e["subject"] == order {
			entry = e["traceparent"]
		}
	}
	if entry != row {
		w.t.Errorf("traceparent %q in the stream, %q in the row", entry, row)
	}
	return entry
}

const (
	clientTrace  = "4bf92f3577b34da6a3ce929d0e0e4736"
	clientSpan   = "00f067aa0ba902b7"
	silentTrace  = "5cf92f3577b34da6a3ce929d0e0e4736"
	tracesAtOnce = "OTEL_BSP_SCHEDULE_DELAY=50"
)

// checkJourney waits for the spans of one order's trace: the request, the publish and the consumer. The last two are
// children of the first, whose context is in the event.
func checkJourney(t *testing.T, c *otlp, traceparent, parent string) {
	t.Helper()
	part := strings.Split(traceparent, "-")
	if len(part) != 4 || part[3] != "01" {
		t.Fatalf("traceparent %q", traceparent)
	}
	want := map[string]span{
		"POST /orders":         {service: "posthaste-api", kind: tracepb.Span_SPAN_KIND_SERVER, parent: parent},
		"WITH":                 {service: "posthaste-api", kind: tracepb.Span_SPAN_KIND_CLIENT, parent: part[2]},
		"publish outbox.order": {service: "posthaste-relay", kind: tracepb.Span_SPAN_KIND_PRODUCER, parent: part[2]},
		"process outbox.order": {service: "posthaste-consumer", kind: tracepb.Span_SPAN_KIND_CONSUMER, parent: part[2]},
	}
	var got map[string]span
	testenv.Eventually(t, 20*time.Second, func() error {
		got = map[string]span{}
		for _, s := range c.spans(t, part[1]) {
			got[s.name] = s
		}
		for name := range want {
			if _, ok := got[name]; !ok {
				return fmt.Errorf("no span %q in trace %s: %v", name, part[1], got)
			}
		}
		return nil
	})
	for name, w := range want {
		if s := got[name]; s.service != w.service || s.kind != w.kind || s.parent != w.parent || s.end < s.start {
			t.Errorf("span %q: %s", name, s.text)
		}
	}
	if got["POST /orders"].id != part[2] {
		t.Errorf("the event carries span %s, the request's is %s", part[2], got["POST /orders"].id)
	}
}

func TestOneTraceFromTheRequestToTheConsumer(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t), newCollector(t)
	w.env = []string{
		"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.url, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=",
		"OTEL_SERVICE_NAME=", tracesAtOnce,
	}
	api, relay := w.spawn("serve"), w.spawn("relay")
	w.spawn("consume", "--group=g")
	w.waitMode("cdc")
	var orders []tracedOrder
	place := func(traceparent string) string {
		o := w.placeTraced(api, traceparent)
		orders = append(orders, o)
		return w.carried(o.id)
	}
	// The trace of a client that does not sample continues, but no span of it is recorded.
	silent := place("00-" + silentTrace + "-" + clientSpan + "-00")
	if !strings.HasPrefix(silent, "00-"+silentTrace+"-") || !strings.HasSuffix(silent, "-00") {
		t.Errorf("unsampled: traceparent %q", silent)
	}
	traced := place("00-" + clientTrace + "-" + clientSpan + "-01")
	if !strings.HasPrefix(traced, "00-"+clientTrace+"-") {
		t.Errorf("traceparent %q is not of the client's trace", traced)
	}
	checkJourney(t, c, traced, clientSpan)
	checkJourney(t, c, place(""), "")
	w.switches(relay, "poll")
	checkJourney(t, c, place(""), "")
	w.env = append(w.env, "OTEL_SERVICE_NAME=printer")
	w.spawn("consume", "--group=named")
	testenv.Eventually(t, 20*time.Second, func() error {
		for _, s := range c.spans(t, clientTrace) {
			if s.service == "printer" {
				return nil
			}
		}
		return errors.New("OTEL_SERVICE_NAME is not heard")
	})

	if got := c.spans(t, silentTrace); len(got) > 0 {
		t.Errorf("%d spans of a trace that is not sampled: %v", len(got), got)
	}
	for _, s := range c.spans(t, "") {
		for _, o := range orders {
			for what, secret := range map[string]string{"key": o.key, "user": o.user, "body": "314159265"} {
				if strings.Contains(s.text, secret) {
					t.Errorf("span %q of %s holds the %s: %s", s.name, s.service, what, s.text)
				}
			}
		}
	}
}

func TestWithTracingOffTheContextPassesThrough(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t), newCollector(t)
	w.env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.url, "OTEL_SDK_DISABLED=true", tracesAtOnce}
	api, relay := w.spawn("serve"), w.spawn("relay")
	// gRPC is not supported. The processes report that and continue.
	w.env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.url, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc", tracesAtOnce}
	consume := w.spawn("consume", "--group=g")
	want := "00-" + clientTrace + "-" + clientSpan + "-01"
	order := w.placeTraced(api, want)
	if got := w.carried(order.id); got != want {
		t.Errorf("traceparent %q, want the client's own", got)
	}
	if got := w.carried(w.placeTraced(api, "").id); got != "" {
		t.Errorf("traceparent %q out of nothing", got)
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(!consume.logged(order.id), "the event is not printed")
	})
	for _, p := range []*child{api, relay, consume} { // otherwise the remaining spans would be sent at the end
		p.stops()
	}
	if !consume.logged("tracing is off: spans are sent as http/protobuf only") {
		t.Error("the wrong protocol is not named")
	}
	if n := c.dials.Load(); n != 0 {
		t.Errorf("the collector was dialled %d times", n)
	}
}

func TestWithoutTheCollectorEverythingGoesOn(t *testing.T) {
	t.Parallel()
	port, hold, err := local.ReservePort() // reserved, so that no process listens on it
	must(t, err)
	defer hold.Close()
	w := newWorld(t)
	w.env = []string{
		fmt.Sprintf("OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:%d", port), "OTEL_EXPORTER_OTLP_TIMEOUT=200",
		"OTEL_TRACES_SAMPLER=no-such-sampler", tracesAtOnce,
	}
	api, relay := w.spawn("serve"), w.spawn("relay")
	for range 5 {
		if w.carried(w.placeTraced(api, "").id) == "" {
			t.Error("the event carries no trace context")
		}
	}
	for _, p := range []*child{api, relay} {
		testenv.Eventually(t, 20*time.Second, func() error {
			return testenv.FailIf(!p.logged("spans cannot be delivered"), "not said: %s", p.output())
		})
		began := time.Now()
		if code := p.stop(); code != 0 || time.Since(began) > 10*time.Second {
			t.Errorf("exit %d after %v: %s", code, time.Since(began), p.output())
		}
		for line := range strings.Lines(p.output()) {
			if !json.Valid([]byte(line)) {
				t.Errorf("a line that is not of the log: %s", line)
			}
		}
		if n := strings.Count(p.output(), "spans cannot be delivered"); n != 1 {
			t.Errorf("said %d times", n)
		}
	}
}

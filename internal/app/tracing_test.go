package app

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

var must = testenv.Must

func TestTracingIsOffByDefault(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		env  map[string]string
		want bool
	}{
		{nil, false},
		{map[string]string{"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, false},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, true},
		{map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, true},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, false},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "no"}, true},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, false},
		{map[string]string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318"}, false},
	} {
		testenv.Equal(t, fmt.Sprint(c.env), tracingWanted(func(name string) string { return c.env[name] }), c.want)
	}
	var off *tracing
	if off.requests() != nil || off.onPublished("redis") != nil || off.queries() != nil {
		t.Error("tracing that is off hooks into something")
	}
	off.shutdown()
}

// The relay's spans name the system that it publishes to.
func TestSpansNameTheSink(t *testing.T) {
	t.Parallel()
	for _, system := range []string{"redis", "nats"} {
		rec := tracetest.NewSpanRecorder()
		tp := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(rec))
		tr := &tracing{provider: tp, tracer: tp.Tracer("test")}
		const sampled = `{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}`
		tr.onPublished(system)(outbox.ModeCDC, "outbox.order", []*outbox.Record{{Headers: []byte(sampled)}})
		want := attribute.String("messaging.system", system)
		if spans := rec.Ended(); len(spans) != 1 || !slices.Contains(spans[0].Attributes(), want) {
			t.Errorf("%s: spans %v", system, spans)
		}
	}
}

func TestSpansOfStatementsQuoteNoValues(t *testing.T) {
	t.Parallel()
	const secret = "not-for-the-collector"
	rec := tracetest.NewSpanRecorder()
	tp := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(rec))
	tr := &tracing{provider: tp, tracer: tp.Tracer("test")}
	cfg, err := pgxpool.ParseConfig(testenv.Postgres(t).URL)
	must(t, err)
	cfg.ConnConfig.Tracer = tr.queries()
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	defer pool.Close()
	const statement = "-- why\nselect $1::text::int"
	ask := func(ctx context.Context) {
		var n int
		if err := pool.QueryRow(ctx, statement, secret).Scan(&n); err == nil || !strings.Contains(err.Error(), secret) {
			t.Fatalf("error %v, which was to quote the value", err)
		}
	}
	ask(t.Context())
	testenv.Equal(t, "spans without a request", len(rec.Ended()), 0)
	ctx, parent := tr.tracer.Start(t.Context(), "request")
	ask(ctx)
	if !parent.IsRecording() {
		t.Error("a statement ended the request's span")
	}
	seen := map[string]bool{}
	for _, s := range rec.Ended() {
		all := fmt.Sprintf("%v %v %v %v", s.Name(), s.Attributes(), s.Events(), s.Status())
		if strings.Contains(all, secret) {
			t.Errorf("span holds the value: %s", all)
		}
		if s.Name() != "acquire connection" && !strings.Contains(all, "22P02") {
			t.Errorf("span says nothing of the error: %s", all)
		}
		if s.Parent().SpanID() != parent.SpanContext().SpanID() {
			t.Errorf("span %q is not the request's child", s.Name())
		}
		seen[s.Name()] = true
	}
	if !seen["SELECT"] || !seen["acquire connection"] {
		t.Errorf("spans %v", seen)
	}
}

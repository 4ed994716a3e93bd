package app

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"posthaste/consumer"
	"posthaste/internal/outage"
	"posthaste/outbox"
)

// tracing makes spans and sends them to a collector. A nil *tracing is off: its methods do nothing.
//
// Spans name routes, statements, streams and event ids; never a key, a body, a user, an argument or an error's text,
// which may quote any of these.
type tracing struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	log      *slog.Logger
}

// stopTracing bounds how long a stopping process waits for the collector.
const stopTracing = 3 * time.Second

// setupTracing turns tracing on if the standard variables name a collector, and returns nil otherwise.
// OTEL_SERVICE_NAME replaces service. It never fails: a process works with or without spans. The caller calls
// shutdown.
func setupTracing(ctx context.Context, service, version string, log *slog.Logger) *tracing {
	log = log.With("component", "tracing")
	if !tracingWanted(os.Getenv) {
		return nil
	}
	protocol := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"))
	if protocol != "" && protocol != "http/protobuf" {
		log.Error("tracing is off: spans are sent as http/protobuf only", "protocol", protocol)
		return nil
	}
	// The SDK reports its own errors, such as a bad variable, only to these two.
	otel.SetLogger(logr.FromSlogHandler(log.Handler()))
	var faults outage.Run
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		if attrs, say := faults.Failed(err); say {
			log.Warn("tracing reports a fault", attrs...)
		}
	}))
	exp, err := otlptracehttp.New(ctx)
	if err != nil {
		log.Error("tracing is off: the exporter cannot be made", "err", err)
		return nil
	}
	res, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", service),
			attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		log.Warn("part of the resource is missing from spans", "err", err)
	}
	tp := sdktrace.NewTracerProvider(sdktrace.WithBatcher(&loggedExporter{SpanExporter: exp, log: log}),
		sdktrace.WithResource(res))
	return &tracing{provider: tp, tracer: tp.Tracer("posthaste", trace.WithInstrumentationVersion(version)), log: log}
}

// tracingWanted reads the variables that the SDK does not read itself.
func tracingWanted(getenv func(string) string) bool {
	if strings.EqualFold(getenv("OTEL_SDK_DISABLED"), "true") || getenv("OTEL_TRACES_EXPORTER") == "none" {
		return false
	}
	return getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// shutdown sends the remaining spans, for stopTracing at most. It may be called again.
func (t *tracing) shutdown() {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTracing)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		t.log.Warn("the last spans were not delivered", "err", err)
	}
}

// loggedExporter logs when the collector becomes unreachable and when it is back, not every lost batch.
type loggedExporter struct {
	sdktrace.SpanExporter
	log    *slog.Logger
	failed atomic.Bool
}

// ExportSpans implements sdktrace.SpanExporter. It logs errors and returns nil.
func (e *loggedExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	err := e.SpanExporter.ExportSpans(ctx, spans)
	switch {
	case err != nil && !e.failed.Swap(true):
		e.log.Warn("spans cannot be delivered; they are dropped", "err", err)
	case err == nil && e.failed.Swap(false):
		e.log.Info("spans are delivered again")
	}
	return nil
}

// remote puts an external trace context into ctx, if it is valid.
func remote(ctx context.Context, traceparent string) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": traceparent})
}

// requests returns api.Options.Trace: it starts a server span per request, whose trace context the request's events
// carry on.
func (t *tracing) requests() func(*http.Request) (*http.Request, func(method, route string, status int)) {
	if t == nil {
		return nil
	}
	w3c := propagation.TraceContext{}
	return func(r *http.Request) (*http.Request, func(method, route string, status int)) {
		headers := propagation.HeaderCarrier(r.Header)
		ctx, span := t.tracer.Start(w3c.Extract(r.Context(), headers), "request",
			trace.WithSpanKind(trace.SpanKindServer))
		// The state belongs to the client's parent and is invalid if that is.
		r.Header.Del("Tracestate")
		w3c.Inject(ctx, headers)
		return r.WithContext(ctx), func(method, route string, status int) {
			span.SetName(method + " " + route)
			span.SetAttributes(attribute.String("http.request.method", method), attribute.String("http.route", route),
				attribute.Int("http.response.status_code", status))
			if status >= http.StatusInternalServerError {
				span.SetStatus(codes.Error, "")
			}
			span.End()
		}
	}
}

// onPublished returns relay.Options.OnPublished for a sink of a system: it makes a producer span, from the event's time
// until now, for every event whose writer's trace is sampled. Ended spans go into the SDK's queue, which drops spans
// when it is full.
func (t *tracing) onPublished(system string) func(mode outbox.Mode, stream string, events []*outbox.Record) {
	if t == nil {
		return nil
	}
	return func(mode outbox.Mode, stream string, events []*outbox.Record) {
		now := time.Now()
		for _, e := range events {
			ctx := remote(context.Background(), e.TraceParent())
			if !trace.SpanContextFromContext(ctx).IsSampled() {
				continue
			}
			start := e.Time
			if start.IsZero() || start.After(now) { // Postgres' clock may be ahead of this one
				start = now
			}
			_, span := t.tracer.Start(ctx, "publish "+stream, trace.WithSpanKind(trace.SpanKindProducer),
				trace.WithTimestamp(start),
				trace.WithAttributes(messaging(system, "send", stream, e.ID.String(), e.Type)...),
				trace.WithAttributes(attribute.String("posthaste.mode", string(mode))))
			span.End(trace.WithTimestamp(now))
		}
	}
}

// handler wraps h in a consumer span, a child of the writer's span.
func (t *tracing) handler(group string, h consumer.Handler) consumer.Handler {
	if t == nil {
		return h
	}
	return func(ctx context.Context, ev consumer.Event) error {
		ctx, span := t.tracer.Start(remote(ctx, consumer.TraceParent(ctx)), "process "+ev.Stream,
			trace.WithSpanKind(trace.SpanKindConsumer),
			trace.WithAttributes(messaging("redis", "process", ev.Stream, ev.ID, ev.Type)...),
			trace.WithAttributes(attribute.String("messaging.consumer.group.name", group),
				attribute.Int("posthaste.attempt", ev.Attempt)))
		defer span.End()
		err := h(ctx, ev)
		if err != nil {
			span.SetStatus(codes.Error, "")
		}
		return err
	}
}

// messaging returns the attributes of a span about an event. They omit the subject, which may identify a user.
func messaging(system, operation, stream, id, kind string) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("messaging.system", system), attribute.String("messaging.operation.type", operation),
		attribute.String("messaging.destination.name", stream), attribute.String("messaging.message.id", id),
		attribute.String("posthaste.event_type", kind),
	}
}

// queries returns a tracer for the connections of requests. Library tracers record the error text of Postgres, which
// quotes values; this one does not.
func (t *tracing) queries() pgx.QueryTracer {
	if t == nil {
		return nil
	}
	return &queryTracer{tracer: t.tracer}
}

// queryTracer makes a client span per statement and per wait for a connection. Work outside a request, such as
// housekeeping, has no span.
type queryTracer struct{ tracer trace.Tracer }

var (
	_ pgx.QueryTracer       = (*queryTracer)(nil)
	_ pgxpool.AcquireTracer = (*queryTracer)(nil)
)

func (q *queryTracer) start(ctx context.Context, name string, attrs ...attribute.KeyValue) context.Context {
	if !trace.SpanFromContext(ctx).IsRecording() {
		return ctx // end then works on a span that records nothing
	}
	ctx, _ = q.tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient),
		trace.WithAttributes(attribute.String("db.system.name", "postgresql")), trace.WithAttributes(attrs...))
	return ctx
}

func (q *queryTracer) end(ctx context.Context, err error) {
	span := trace.SpanFromContext(ctx)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
			span.SetAttributes(attribute.String("db.response.status_code", pg.Code))
		}
		span.SetStatus(codes.Error, "")
	}
	span.End()
}

func (q *queryTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	return q.start(ctx, verb(d.SQL), attribute.String("db.query.text", d.SQL))
}

func (q *queryTracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryEndData) {
	q.end(ctx, d.Err)
}

func (q *queryTracer) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool,
	_ pgxpool.TraceAcquireStartData,
) context.Context {
	return q.start(ctx, "acquire connection")
}

func (q *queryTracer) TraceAcquireEnd(ctx context.Context, _ *pgxpool.Pool, d pgxpool.TraceAcquireEndData) {
	q.end(ctx, d.Err)
}

// verb returns a statement's first word after its comments.
func verb(statement string) string {
	for line := range strings.Lines(statement) {
		if f := strings.Fields(line); len(f) > 0 && !strings.HasPrefix(f[0], "--") {
			return strings.ToUpper(f[0])
		}
	}
	return "SQL"
}

package idem

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	DefaultWork      = 10 * time.Second
	DefaultMaxBody   = 64 << 10
	DefaultMaxInline = 16 << 10
)

// HTTPOptions configure Guard.Handler.
type HTTPOptions struct {
	// Route scopes the key, together with the method, and is the metrics label; one of Options.Routes.
	Route string
	// Scope returns the owner of the key, for example the authenticated user's id: put the guard after the
	// authentication. Required. A request with the scope "" is refused (401), because all anonymous callers would share
	// their keys.
	Scope func(r *http.Request) string
	// Lookup finds the finished operation in the database; see Request.Lookup. nil: none.
	Lookup func(r *http.Request, k Key, f Fingerprint) (Found, error)
	// Render answers with a result whose body is not in its record: one from Lookup, one longer than MaxInline, one
	// that the handler noted with SetRef. nil: such a replay runs the handler again, which finds the row and answers
	// from it.
	Render func(w http.ResponseWriter, r *http.Request, rec Record)
	// Work bounds the handler; it must be shorter than the lease. Zero: DefaultWork.
	Work time.Duration
	// MaxBody is the longest request body in bytes. Zero: DefaultMaxBody.
	MaxBody int64
	// MaxInline is the longest response body that is kept in Redis. Zero: DefaultMaxInline.
	MaxInline int
}

// Handler guards next: of many requests with one Idempotency-Key, one runs it and the others get its response, byte for
// byte. The response is kept if retrying cannot change it: 2xx, 3xx, and 4xx other than 401, 403, 408, 425 and 429.
// After any other response, and after a panic, the key is free again, so next must have done nothing then. If next
// cannot know (a COMMIT that was not answered), it must call Unsettled.
//
// next runs within Work, and a client that disconnects does not cancel it. Its effect must be protected by a unique
// index on the key (KeyFrom): Redis only accelerates. Its response is buffered.
func (g *Guard) Handler(o HTTPOptions, next http.Handler) http.Handler {
	o.Work, o.MaxBody = cmp.Or(o.Work, DefaultWork), cmp.Or(o.MaxBody, DefaultMaxBody)
	o.MaxInline = cmp.Or(o.MaxInline, DefaultMaxInline)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { g.serve(&o, w, r, next) })
}

type contextKey struct{}

type guarded struct {
	key       Key
	fp        Fingerprint
	ref       string
	unsettled bool
}

// KeyFrom returns the hashed key of a guarded request, for the unique column of its effect, and the fingerprint, for
// another column of the row. ok is false outside a guarded handler.
func KeyFrom(ctx context.Context) (k Key, f Fingerprint, ok bool) {
	gd, ok := ctx.Value(contextKey{}).(*guarded)
	if !ok {
		return Key{}, Fingerprint{}, false
	}
	return gd.key, gd.fp, true
}

// SetRef sets the reference of a guarded request's result, for HTTPOptions.Render. The body is then not kept in Redis.
// A ref with '|' or a line break, which separate the parts of a record, is ignored, and the body is kept.
func SetRef(ctx context.Context, ref string) {
	if gd, ok := ctx.Value(contextKey{}).(*guarded); ok && !strings.ContainsAny(ref, "|\r\n") {
		gd.ref = ref
	}
}

// Unsettled reports that a guarded request ends without knowing whether its effect happened. The key stays taken until
// its lease ends, and the response is not kept.
func Unsettled(ctx context.Context) {
	if gd, ok := ctx.Value(contextKey{}).(*guarded); ok {
		gd.unsettled = true
	}
}

func (g *Guard) serve(o *HTTPOptions, w http.ResponseWriter, r *http.Request, next http.Handler) {
	client, err := ParseKey(r.Header)
	if err != nil {
		code := "idempotency_key_invalid"
		if errors.Is(err, ErrKeyMissing) {
			code = "idempotency_key_missing"
		}
		refuse(w, http.StatusBadRequest, code, err.Error(), 0)
		return
	}
	scope := o.Scope(r)
	if scope == "" {
		refuse(w, http.StatusUnauthorized, "unauthorized", "An idempotency key needs an authenticated user", 0)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, o.MaxBody))
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		refuse(w, http.StatusRequestEntityTooLarge, "body_too_large", "The body is too large", 0)
		return
	case err != nil:
		refuse(w, http.StatusRequestTimeout, "request_timeout", "The body did not arrive", time.Second)
		return
	}
	w.Header().Set(KeyHeader, r.Header.Get(KeyHeader))
	wait, _ := ParseWait(r.Header)
	req := Request{
		Key:         NewKey(scope, r.Method, o.Route, client),
		Fingerprint: NewFingerprint(1, r.Header.Get("Content-Type"), r.URL.RequestURI(), string(body)),
		Route:       o.Route, Wait: wait,
	}
	if o.Lookup != nil {
		req.Lookup = func(ctx context.Context) (Found, error) {
			return o.Lookup(r.WithContext(ctx), req.Key, req.Fingerprint)
		}
	}
	d, err := g.Begin(r.Context(), req)
	r.Body = io.NopCloser(bytes.NewReader(body))
	switch {
	case err != nil:
		refuse(w, http.StatusServiceUnavailable, "temporarily_unavailable", "Nothing was done; try again", time.Second)
	case d.Outcome == Mismatch:
		refuse(w, http.StatusUnprocessableEntity, "idempotency_key_reused", "The key was used for another request", 0)
	case d.Outcome == Busy:
		refuse(w, http.StatusConflict, "operation_in_progress", "Another attempt with this key is in progress",
			d.RetryAfter)
	case d.Outcome == Replay:
		g.replay(o, w, r, &d, &req, next)
	default:
		g.work(o, w, r, d.Ticket, req.Key, next)
	}
}

// replay answers from a record.
func (g *Guard) replay(o *HTTPOptions, w http.ResponseWriter, r *http.Request, d *Decision, req *Request,
	next http.Handler,
) {
	rec := d.Record
	head, body, inline := decodeResponse(rec.Payload)
	switch {
	case inline:
		w.Header().Set("Idempotent-Replayed", "true")
		maps.Copy(w.Header(), head)
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		w.WriteHeader(rec.Status)
		_, _ = io.WriteString(w, body)
	case o.Render != nil:
		w.Header().Set("Idempotent-Replayed", "true")
		o.Render(w, r, rec)
	default:
		g.work(o, w, r, d.Ticket, req.Key, next)
	}
}

// work runs the handler under a ticket and keeps its response.
func (g *Guard) work(o *HTTPOptions, w http.ResponseWriter, r *http.Request, t *Ticket, key Key, next http.Handler) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), o.Work)
	defer cancel()
	ctx, stop := t.Keep(ctx)
	gd := &guarded{key: key, fp: t.fp}
	rec := &recorder{header: http.Header{}, status: http.StatusOK}
	settled := false
	defer func() {
		stop()
		if !settled && !gd.unsettled {
			t.Abort(ctx)
		}
	}()
	next.ServeHTTP(rec, r.WithContext(context.WithValue(ctx, contextKey{}, gd)))
	w.Header().Set("Idempotent-Replayed", "false")
	if t.Degraded() {
		w.Header().Set("Idempotency-Guard", "db")
	}
	rec.send(w)
	if settled = !gd.unsettled && final(rec.status); settled {
		res := Record{Status: rec.status, Ref: gd.ref}
		if gd.ref == "" {
			res.Payload = rec.encode(o.MaxInline)
		}
		t.Commit(ctx, res)
	}
}

// final reports whether retrying cannot change an answer.
func final(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusRequestTimeout, http.StatusTooEarly,
		http.StatusTooManyRequests:
		return false
	}
	return status < 500
}

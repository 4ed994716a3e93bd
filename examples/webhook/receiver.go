// Package webhook is an example receiver of posthaste deliver: it verifies each request as Standard Webhooks describe,
// and accepts each event once.
package webhook

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// tolerance is how far a timestamp may be off; it limits how long a recorded request can be replayed.
	tolerance = 5 * time.Minute
	// maxBody is the largest body that is read: the largest payload, and its envelope.
	maxBody = 9 << 20
)

// Event is a CloudEvent that Receiver has verified.
type Event struct {
	ID      string          `json:"id"`
	Source  string          `json:"source"`
	Type    string          `json:"type"`
	Subject string          `json:"subject"`
	Time    time.Time       `json:"time"`
	Data    json.RawMessage `json:"data"`
}

// Receiver is the receiver's side of webhooks. Use New.
type Receiver struct {
	keys   [][]byte
	accept func(ctx context.Context, ev Event) error

	mu   sync.Mutex
	seen map[string]bool
}

// New returns a receiver that passes each event to accept, one at a time. A request must be signed with one of the
// secrets, whsec_ and base64: there are two while the secret is replaced. If accept returns an error, the receiver
// answers 503, and the event is sent again.
func New(secrets []string, accept func(ctx context.Context, ev Event) error) (*Receiver, error) {
	r := &Receiver{accept: accept, seen: map[string]bool{}}
	for _, s := range secrets {
		encoded, ok := strings.CutPrefix(s, "whsec_")
		key, err := base64.StdEncoding.DecodeString(encoded)
		if !ok || err != nil || len(key) < 16 {
			return nil, errors.New("webhook: want secrets that are whsec_ and base64 of at least 16 bytes")
		}
		r.keys = append(r.keys, key)
	}
	return r, nil
}

// ServeHTTP implements http.Handler.
func (r *Receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxBody))
	var ev Event
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		http.Error(w, "too large", http.StatusRequestEntityTooLarge)
	case err != nil:
		http.Error(w, "the body ended early", http.StatusRequestTimeout) // the sender retries
	case !r.verify(req.Header, body, time.Now()):
		http.Error(w, "the signature is not valid", http.StatusUnauthorized)
	case json.Unmarshal(body, &ev) != nil || ev.ID != req.Header.Get("Webhook-Id"):
		http.Error(w, "the body is not an event", http.StatusBadRequest)
	case r.once(req.Context(), ev) != nil:
		http.Error(w, "not now", http.StatusServiceUnavailable)
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

// once accepts an event unless it was accepted before. A receiver with a database does this in the transaction of the
// effect, with a table of ids that has a unique key.
func (r *Receiver) once(ctx context.Context, ev Event) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seen[ev.ID] {
		return nil
	}
	err := r.accept(ctx, ev)
	r.seen[ev.ID] = err == nil
	return err
}

// verify checks the signature and the age of a request. There may be several signatures while a secret is replaced.
func (r *Receiver) verify(h http.Header, body []byte, now time.Time) bool {
	stamp := h.Get("Webhook-Timestamp")
	sec, err := strconv.ParseInt(stamp, 10, 64)
	if err != nil || now.Sub(time.Unix(sec, 0)).Abs() > tolerance {
		return false
	}
	for _, key := range r.keys {
		m := hmac.New(sha256.New, key)
		_, _ = fmt.Fprintf(m, "%s.%s.%s", h.Get("Webhook-Id"), stamp, body) // writing to a hash never fails
		want := "v1," + base64.StdEncoding.EncodeToString(m.Sum(nil))
		for _, got := range strings.Fields(h.Get("Webhook-Signature")) {
			if hmac.Equal([]byte(got), []byte(want)) {
				return true
			}
		}
	}
	return false
}
